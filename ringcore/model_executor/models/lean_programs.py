"""Programs that build models of transformers and end with an answer: most of their time are imports, which are as lean
here as in a worker."""

from __future__ import annotations

import sys

from ringcore.host.collection import without_collection
from ringcore.model_executor.models.lean_imports import without_compiler

__all__ = ["check_folder"]


def check_folder(payload: bytes, fds: dict[str, int]) -> None:
    """The entry of the process that `front_end.folder_check` starts."""
    with without_compiler():
        with without_collection():
            from ringcore.model_executor.models.transformers.folder_check import main
        main(payload, fds)


def _list_types() -> None:
    """`ringcore models` runs it: `python -m ... [TYPE ...]`."""
    with without_compiler():
        with without_collection():
            from ringcore.model_executor.models.transformers.known_types import main
        main(sys.argv[1:])


if __name__ == "__main__":
    _list_types()
