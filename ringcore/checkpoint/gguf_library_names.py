"""What the package `gguf` calls the tensors of a Hugging Face checkpoint: a file has the experts of a layer in one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

__all__ = ["library_names", "without_expert"]

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def library_names(architecture: str, num_layers: int) -> Callable[[str], str | None] | None:
    """A Hugging Face name without weight or bias -> the file's, None if unknown. None for an architecture that the
    installed package does not know."""
    from gguf.constants import MODEL_ARCH_NAMES

    kind = next((kind for kind, known in MODEL_ARCH_NAMES.items() if known == architecture), None)
    return None if kind is None else _names(kind, num_layers)


@functools.cache
def _names(kind: int, num_layers: int) -> Callable[[str], str | None]:
    from gguf.constants import MODEL_ARCH
    from gguf.tensor_mapping import get_tensor_name_map

    names: Callable[[str], str | None] = get_tensor_name_map(MODEL_ARCH(kind), num_layers).get_name
    return names


def without_expert(name: str) -> tuple[str, int | None]:
    """(the name of all experts' tensor, which of them it is), of any Hugging Face name."""
    found = _EXPERT.search(name)
    return (name, None) if found is None else (_EXPERT.sub(".experts.", name), int(found[1]))
