"""One file a model family, and one package for every model of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, assert_never

from ringcore.checkpoint import ModelSpec, TransformersSpec
from ringcore.checkpoint.eagle_head import EagleHeadSpec
from ringcore.checkpoint.mtp_head import AnyHeadSpec, MtpHeadSpec
from ringcore.distributed.parallel import ONLY_STAGE
from ringcore.families import FAMILIES
from ringcore.host.collection import without_collection
from ringcore.host.own_process import is_own_process
from ringcore.model_executor.arithmetic import FASTEST, Arithmetic
from ringcore.model_executor.linear_schemes.schemes import schemes_of
from ringcore.model_executor.models.lean_imports import without_compiler

if TYPE_CHECKING:
    import torch

    from ringcore.checkpoint import AnySpec, Families
    from ringcore.distributed.parallel import Stage, TensorParallel
    from ringcore.model_executor.models.base import CausalLM
    from ringcore.model_executor.models.draft_head import DraftHead

__all__ = ["build_head", "build_model", "few_layers", "model_class"]


def build_model(
    spec: AnySpec,
    tp: TensorParallel,
    dtype: torch.dtype,
    max_model_len: int,
    families: Families = FAMILIES,
    stage: Stage = ONLY_STAGE,
    expert_parallel: bool = False,
    redundant_experts: int | None = None,
    arithmetic: Arithmetic = FASTEST,
) -> CausalLM:
    """The model of one rank, without weights: what its stage of a pipeline has. Raises `ModelLoadError` for one that
    cannot be computed."""
    scheme_of = schemes_of(spec.quantization)
    given = tp, dtype, max_model_len, scheme_of, stage, expert_parallel, redundant_experts, arithmetic
    match spec:
        case ModelSpec():
            native = model_class(spec.architecture, families)
            return native(spec, *given)
        case TransformersSpec():
            assert not arithmetic.is_batch_invariant, "refused with the options"
            with _lean_imports():
                from ringcore.model_executor.models.transformers import TransformersModel

                return TransformersModel(spec, *given)
        case _:
            assert_never(spec)


def few_layers(spec: AnySpec) -> AnySpec:
    """The model of a few of its layers, enough for one of every kind."""
    if isinstance(spec, ModelSpec):
        return spec.few_layers()
    with _lean_imports():
        from ringcore.model_executor.models.transformers.few_layers import few_layers

        return few_layers(spec)


@contextmanager
def _lean_imports() -> Iterator[None]:
    """Of transformers: collection would take a fifth of the time."""
    with without_collection(), without_compiler() if is_own_process() else nullcontext():
        yield


def build_head(
    head: AnyHeadSpec,
    index: int,
    tp: TensorParallel,
    dtype: torch.dtype,
    max_model_len: int,
    most: int,
    families: Families = FAMILIES,
    expert_parallel: bool = False,
) -> DraftHead:
    """A head of one rank, without weights. index: of its attention layer, after those of the model. most: the most
    tokens of a step of the model."""
    given = index, tp, dtype, max_model_len, most
    match head:
        case EagleHeadSpec():
            from ringcore.model_executor.models.eagle_head import EagleHead

            return EagleHead(head, *given)
        case MtpHeadSpec():
            from ringcore.model_executor.models.mtp_head import MtpHead, MtpLayer, NativeMtpLayer

            of_layer = index, tp, dtype, max_model_len
            if isinstance(head.layer, ModelSpec):
                layer: MtpLayer = NativeMtpLayer(head, families[head.layer.architecture], *of_layer)
            else:
                from ringcore.model_executor.models.transformers.mtp_layer import TransformersMtpLayer

                layer = TransformersMtpLayer(head, *of_layer, expert_parallel)
            return MtpHead(head, layer, dtype, most)
        case _:
            assert_never(head)


def model_class(architecture: str, families: Families = FAMILIES) -> type[CausalLM]:
    """The native class for a `ModelSpec.architecture`. Raises `ModelLoadError` listing the known names."""
    module, _, name = families[architecture].model.partition(":")
    found: type[CausalLM] = vars(importlib.import_module(module))[name]
    return found
