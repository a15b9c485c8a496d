"""A row of eight tokens that asks for everything, with numbers that can be followed by eye.

A logit is the logarithm of a weight, so a bias of ln 16 is a factor of 16, a repetition penalty of 2 the square root of
a weight above 1 and the square of one below, and a frequency penalty of ln 2 halves a weight for every time that its
token was generated.

    token                                    0      1      2      3     4     5     6     7
    raw weight                              64     16    1/4     32     6     3     2     1
    + bias of ln 16 on 1                    64    256    1/4     32     6     3     2     1
    repetition penalty, 2: 0, 1 and 2        8     16   1/16     32     6     3     2     1
    frequency penalty, ln 2: 1 once, 2 twice 8      8   1/64     32     6     3     2     1
    presence penalty, ln 2: 1 and 2          8      4  1/128     32     6     3     2     1
    all but 3 allowed                        8      4  1/128      0     6     3     2     1
    temperature 1/2: squares                64     16     ~0      0    36     9     4     1   of 130
    top_k=5                                 64     16      0      0    36     9     4     0   of 129
    top_p=0.965 of 129 is 124.5: 125        64     16      0      0    36     9     0     0
    min_p=0.2 of 64 is 12.8                 64     16      0      0    36     0     0     0

Another order would show: penalties before the bias leave token 1 the weight 16, the other penalties before that for
repetition 8; without the mask token 3 is greedy's; top_p before top_k is of 130 and needs 129; min_p before the
temperature keeps 3 and 2 beside 8.
"""

from __future__ import annotations

import math

import torch
from adjusted_rows import Row

RAW = [64, 16, 1 / 4, 32, 6, 3, 2, 1]
ROW = Row(
    bias={1: math.log(16)},
    prompt=[0, 2],
    output=[2, 1, 2],
    repetition=2.0,
    frequency=math.log(2),
    presence=math.log(2),
    allowed=frozenset(range(8)) - {3},
)
BIASED = [64, 256, 1 / 4, 32, 6, 3, 2, 1]
PENALIZED = [8, 4, 1 / 128, 32, 6, 3, 2, 1]
ADJUSTED = [8, 4, 1 / 128, 0, 6, 3, 2, 1]

COLD = {"temperature": 0.5}
TOP_K = COLD | {"top_k": 5}
TOP_P = TOP_K | {"top_p": 0.965}
MIN_P = TOP_P | {"min_p": 0.2}
# Filters, and the weights of the tokens that they leave.
STAGES = [
    ({"temperature": 1.0}, ADJUSTED),
    (COLD, [64, 16, 1 / 128**2, 0, 36, 9, 4, 1]),
    (TOP_K, [64, 16, 0, 0, 36, 9, 4, 0]),
    (TOP_P, [64, 16, 0, 0, 36, 9, 0, 0]),
    (MIN_P, [64, 16, 0, 0, 36, 0, 0, 0]),
    (COLD | {"min_p": 0.2}, [64, 16, 0, 0, 36, 0, 0, 0]),
    (COLD | {"top_p": 0.965}, [64, 16, 0, 0, 36, 9, 4, 0]),
    ({"temperature": 0.0}, [1, 0, 0, 0, 0, 0, 0, 0]),
]


def logits(n: int = 1) -> torch.Tensor:
    """[n, 8] float32."""
    return torch.tensor(RAW).log().expand(n, -1).contiguous()
