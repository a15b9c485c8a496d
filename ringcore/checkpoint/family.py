"""What is particular to a model family, as one record, and the table of such records; the records are in
`ringcore.families`. It imports no torch: the engine process reads configurations and checkpoints by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import ExpertsSpec, RopeSpec
from ringcore.checkpoint.rope import read_one_rope
from ringcore.errors import ModelLoadError

__all__ = ["Activation", "BiasRule", "Families", "Family", "GGUFFormat", "LayerNorms"]

Activation = Literal["silu", "gelu_tanh"]
# True or False: whatever the configuration says. A string: the flag of config.json that decides; absent means False.
BiasRule = bool | str
# (config.json, num_layers, its `layer_types`) -> the kind of each layer: see `sliding_windows`
LayerKinds = Callable[[Metadata, int, list[str] | None], Sequence[str]]
# (config.json, max_position_embeddings) -> `ModelSpec.rope` and `ModelSpec.sliding_rope`
RopeReader = Callable[[Metadata, int], tuple[RopeSpec, RopeSpec | None]]
# (config.json, num_layers) -> `ModelSpec.experts`
ExpertsReader = Callable[[Metadata, int], ExpertsSpec]
# (header, num_layers, hidden_size // num_heads) -> fields of `ModelSpec`
GGUFAttention = Callable[[Metadata, int, int], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """The names of a layer's norms in a checkpoint, within `model.layers.<i>.`."""

    input: str = "input_layernorm"  # before attention
    attention_out: str | None = None  # of attention's output, before the residual add (post-norm); None: there is none
    mlp: str = "post_attention_layernorm"  # before the MLP
    mlp_out: str | None = None  # of the MLP's output, before the residual add; None: there is none
    query: str = "self_attn.q_norm"  # per head, where `Family.head_norm`
    key: str = "self_attn.k_norm"

    def of_hidden(self) -> list[str]:
        """Those over the hidden size."""
        return [name for name in (self.input, self.attention_out, self.mlp, self.mlp_out) if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    """How a GGUF file stores a family."""

    name: str  # general.architecture
    model_type: str | None = None  # transformers' name of it; None: it has none
    # The rows of q and k are stored for interleaved RoPE, which rotates the pairs (0, 1), (2, 3), ...; a Hugging Face
    # checkpoint pairs the halves, (0, d/2), (1, d/2 + 1), ...
    interleaved_rope: bool = False
    # Reads sliding windows and what goes with them; None: a file that has them is refused.
    attention: GGUFAttention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One record per family: how its configuration and its checkpoint are read, and what its model computes.

    The defaults are those of Llama without its biases on the MLP.
    """

    architectures: tuple[str, ...]  # names in `architectures` of config.json
    model: str  # "module:Class", imported by a worker alone

    # How config.json is read.
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' for absent fields; an explicit null stays
    not_computed: tuple[str, ...] = ()  # fields that enable what the model class does not implement
    activation_field: str = "hidden_act"
    attention_bias: BiasRule = "attention_bias"  # on q, k and v
    attention_out_bias: BiasRule = "attention_bias"
    mlp_bias: BiasRule = False
    attention_scale_field: str | None = None  # scores are divided by the root of this field; None: of head_dim
    read_ropes: RopeReader = read_one_rope
    layer_kinds: LayerKinds | None = None  # None: a configuration with sliding windows is refused
    read_experts: ExpertsReader | None = None  # None: every layer has an MLP

    # How a checkpoint stores it.
    norms: LayerNorms = LayerNorms()
    mtp_layers: str | None = None  # the names of layers of multi-token prediction; None: it has none
    gguf: GGUFFormat | None = None  # None: a GGUF file does not tell it from another family

    # What is computed, fixed by the family's code and not stated by its configuration.
    head_norm: bool = False  # q and k are normalised per head before the rotary embedding (QK norm)
    norm_plus_one: bool = False  # norms multiply by 1 + weight; a GGUF file stores the sum
    activation: Activation = "silu"  # of the MLP's gate
    scaled_embeddings: bool = False  # the first layer's input is the embedding times the root of hidden_size

    # What was measured where keys and values in FP8 cost more than 1% of perplexity: kv_cache_dtype="fp8" is refused.
    fp8_kv_loss: str | None = None


class Families:
    """The families that have a model class of their own. It alone answers whether an architecture has one."""

    def __init__(self, *families: Family) -> None:
        self._by_architecture = {name: family for family in families for name in family.architectures}
        self._by_gguf_name = {family.gguf.name: family for family in families if family.gguf is not None}

    @property
    def architectures(self) -> list[str]:
        return list(self._by_architecture)

    @property
    def gguf_names(self) -> list[str]:
        """What general.architecture is in the files of these families."""
        return list(self._by_gguf_name)

    def native(self, architectures: Iterable[str]) -> tuple[str, Family] | None:
        """The first of these architectures that has a family, and the family; None where none has."""
        return next(
            ((name, self._by_architecture[name]) for name in architectures if name in self._by_architecture), None
        )

    def __getitem__(self, architecture: str) -> Family:
        """The family of a `ModelSpec.architecture`. Raises `ModelLoadError` that lists the known names."""
        found = self.native([architecture])
        if found is None:
            raise ModelLoadError(
                f"architecture {architecture!r} is not known; known: {', '.join(self._by_architecture)}",
                architecture=architecture,
            )
        return found[1]

    def of_gguf(self, meta: Metadata) -> tuple[GGUFFormat, Family]:
        """By the general.architecture of a header. Raises `ModelLoadError` that lists the known names."""
        name = meta.text("general.architecture")
        family = self._by_gguf_name.get(name)
        if family is None or family.gguf is None:
            raise ModelLoadError(
                f"{meta.path}: the architecture {name!r} is not known; known: {', '.join(sorted(self._by_gguf_name))}",
                path=meta.path,
                architecture=name,
            )
        return family.gguf, family
