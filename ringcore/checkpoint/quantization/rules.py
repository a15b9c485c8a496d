"""Which matrices of a model are of which format, by their names in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from ringcore.checkpoint.gguf_library_names import library_names, without_expert
from ringcore.checkpoint.quantization.expert_formats import ExpertsFormat
from ringcore.checkpoint.quantization.formats import Format, GgufFormat, OnLoadFormat

__all__ = ["ALL_LINEARS", "BlockKinds", "Quantization", "Rule", "matches"]

ALL_LINEARS = "Linear"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """targets: as `matches` reads them."""

    targets: list[str]
    format: Format


class BlockKinds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The types of a GGUF file's matrices whose names in a checkpoint the package `gguf` knows.

    kinds: of `GGUF_BLOCKS`, by the file's names without ".weight"; all experts of a layer are one. rounds_inputs: see
    `GgufFormat`.
    """

    architecture: str
    num_layers: int
    kinds: dict[str, str]
    rounds_inputs: bool

    def format_of(self, matrix: str) -> GgufFormat | None:
        names = library_names(self.architecture, self.num_layers)
        assert names is not None, "the file was read"
        kind = self.kinds.get(names(without_expert(matrix)[0]) or "")
        return None if kind is None else GgufFormat(kind, self.rounds_inputs)


class Quantization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first rule that names a matrix gives its format, those for all linears last, unless `ignored` names it too.

    method: for messages. is_on_load: the checkpoint is not quantized. experts: of the matrices of all experts, where a
    checkpoint has one tensor for a layer; None: they are dense. blocks: in place of rules.
    """

    method: str
    rules: list[Rule]
    ignored: list[str] = []
    experts: ExpertsFormat | None = None
    blocks: BlockKinds | None = None

    @property
    def is_on_load(self) -> bool:
        return any(isinstance(rule.format, OnLoadFormat) for rule in self.rules)

    def format_of(self, matrix: str) -> Format | None:
        """matrix: its name without ".weight". None: it is dense."""
        if self.blocks is not None:
            return self.blocks.format_of(matrix)
        if matches(self.ignored, matrix):
            return None
        rules = sorted(self.rules, key=lambda rule: ALL_LINEARS in rule.targets)
        return next((rule.format for rule in rules if matches(rule.targets, matrix)), None)


def matches(patterns: Sequence[str], matrix: str) -> bool:
    """Whether any pattern names a matrix: "Linear" all, "re:..." those that the regular expression matches from their
    beginning, any other those whose name has it, in whole components."""
    return any(_matches(pattern, matrix) for pattern in patterns)


def _matches(pattern: str, matrix: str) -> bool:
    if pattern == ALL_LINEARS:
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], matrix) is not None
    return f".{pattern}." in f".{matrix}."
