import pytest

from ringcore.testing import VirtualClock


def test_it_stands_still_until_it_is_told():
    clock = VirtualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(2.5)
    assert clock.now() == 7.5
    clock.sleep_until(1e6)
    assert clock.now() == 1e6


def test_it_never_goes_back():
    clock = VirtualClock(5.0)
    clock.sleep_until(4.0)
    assert clock.now() == 5.0
    with pytest.raises(AssertionError):
        clock.advance(-1.0)
