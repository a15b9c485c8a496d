"""Reads the machine code that a kernel was compiled to."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton

_DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)\s*(.*?);")
_REGISTER = re.compile(r"^R(\d+)\b")


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: list[str]

    @property
    def written(self) -> set[int]:
        """The registers that it writes, but for accumulators of tensor cores."""
        first = _REGISTER.match(self.operands[0]) if self.operands else None
        if first is None or self.name.startswith(("ST", "HGMMA", "RED", "BAR")):
            return set()
        widths = {4: r"\.128|\.M88\.4", 2: r"\.64\b|\.M88\.2|WIDE"}
        width = next((width for width, names in widths.items() if re.search(names, self.name)), 1)
        return set(range(int(first[1]), int(first[1]) + width))

    @property
    def read_by_tensor_cores(self) -> set[int]:
        """The registers of the first matrix of a wgmma, of 16-bit numbers, where it is in registers."""
        first = _REGISTER.match(self.operands[1]) if self.name.startswith("HGMMA") else None
        return set() if first is None else set(range(int(first[1]), int(first[1]) + 4))


def disassemble(cubin: bytes, folder: str | os.PathLike[str]) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the index of each label."""
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([_DISASSEMBLER, "-c", path], check=True, capture_output=True, text=True).stdout
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(Instruction(found[1], [operand.strip() for operand in found[2].split(",")]))
    return instructions, labels


def overwritten_operands(instructions: list[Instruction], labels: dict[str, int]) -> list[tuple[int, str]]:
    """The instructions which write registers that a wgmma may still read, since none has waited for it: (index, name).
    Follows each wgmma to the wait, into the next round of a loop."""
    found = []
    for start, wgmma in enumerate(instructions):
        operands, at, has_jumped = wgmma.read_by_tensor_cores, start + 1, False
        while operands and at < len(instructions):
            instruction = instructions[at]
            if instruction.name == "WARPGROUP.DEPBAR.LE" and instruction.operands[-1] == "0x0":
                break
            if instruction.written & operands:
                found.append((at, instruction.name))
                break
            target = re.search(r"`\((\.L_x_\d+)\)", " ".join(instruction.operands))
            if instruction.name == "BRA" and target and labels[target[1]] <= start and not has_jumped:
                at, has_jumped = labels[target[1]], True
            else:
                at += 1
    return found
