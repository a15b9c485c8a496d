"""The scheme of a model's experts, by how its checkpoint has them."""

from __future__ import annotations

from typing import assert_never

from ringcore.checkpoint.quantization import ExpertsFormat, Mxfp4Format
from ringcore.model_executor.expert_schemes.dense import DenseScheme
from ringcore.model_executor.expert_schemes.mxfp4_scheme import Mxfp4Scheme
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme

__all__ = ["experts_scheme"]


def experts_scheme(form: ExpertsFormat | None, is_transposed: bool = False) -> ExpertsScheme:
    """is_transposed: of dense ones."""
    match form:
        case None:
            return DenseScheme(is_transposed)
        case Mxfp4Format():
            return Mxfp4Scheme(form)
        case _:
            assert_never(form)
