"""What a model of transformers that is refused would need."""

from __future__ import annotations

from enum import Enum

__all__ = ["Need"]


class Need(Enum):
    """In words, and whether it is planned."""

    REQUEST_STATE = ("state layers: a state of each request besides the KV cache", True)
    KNOWN_MASK = ("attention by a causal mask, a window or chunks alone", False)
    TEXT_PART = ("a text part that is a model of its own", False)
    INTERFACE = ("a class whose attention goes through transformers' interface", False)
    POSITIONS = ("positions that follow from a token's place in its sequence alone", False)
    DECODER = ("a decoder alone, whose tokens see earlier ones", False)
    ONE_CALL = ("one attention call in each layer, each of its own keys and values", False)
    INDEPENDENCE = ("layers that compute each token by itself", False)
    NO_VALUES = ("a pass that asks for no values of tensors, and makes no masks of its own", False)
    CONFIGURATION = ("the configuration of a published model: the default one cannot be built", False)
    PACKAGE = ("a package that is not installed, which transformers imports to build it", False)
    OTHER = ("a change of this project", False)

    def __init__(self, text: str, is_planned: bool) -> None:
        self.text, self.is_planned = text, is_planned

    @classmethod
    def of_operation(cls, name: str) -> Need:
        """Of a model whose tokens meet in this operation of torch, outside attention."""
        match name:
            case "convolution" | "constant_pad_nd" | "slice" | "select" | "unbind" | "roll":
                return cls.REQUEST_STATE
            case "_softmax" | "mm" | "bmm" | "baddbmm" | "addmm":
                return cls.INTERFACE
            case "cumsum":
                return cls.POSITIONS
            case _:
                return cls.INDEPENDENCE
