"""How a quantized linear rounds its inputs before the product."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["InputFormat"]


class InputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """number: of the codes. scale: of each token, computed as it comes; of each `group` inputs of a token, likewise; or
    one of the checkpoint, its tensor `input_scale`."""

    number: Literal["fp8", "int8"]
    scale: Literal["token", "group", "tensor"]
    group: int = 0
