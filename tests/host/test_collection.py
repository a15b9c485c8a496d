"""The garbage collector is off within, and on again after an error; where it was off it stays so."""

from __future__ import annotations

import gc
from contextlib import suppress

from ringcore.host.collection import without_collection


def test_the_collector_is_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with suppress(ZeroDivisionError), without_collection():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
