"""Plans the hybrid KV cache: forms KV cache groups of layers, and sets the number of blocks of every rank. Pure
arithmetic on the specs and free memory that the ranks report.

    two full-attention layers (f) and four with a sliding window (s), whose pages have one size:

    model     s0 s1 f2 s3 s4 f5
    groups    s0 s1    s3 s4    f2 f5     each with its own blocks, from one pool
    tensor 0  s0       s3       f2        block b of a group: page b of tensor i holds what its layer i stores
    tensor 1     s1       s4       f5
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from ringcore.errors import ConfigError
from ringcore.kv_cache.capacity import too_few_blocks, too_little_memory
from ringcore.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LocalAttentionSpec,
)

__all__ = ["plan_kv_cache", "plan_without_limit"]

_MORE_THAN_ANY_HOST_HAS = 1 << 60  # bytes
_SMALLEST_CONTEXT = 2  # a prompt of one token, and one that is generated
_GROUP_PRICE_PERCENT = 2


def plan_kv_cache(
    specs: list[dict[str, KVCacheSpec]],
    available_bytes: list[int],
    *,
    max_model_len: int,
    fit_max_model_len: bool,
    max_tokens_in_flight: int,
    num_blocks_override: int | None,
    tables: Sequence[Mapping[str, int]] = (),
    num_stages: int = 1,
) -> KVCacheConfig:
    """The cache of all ranks together: the one with room for the fewest blocks sets their number.

    specs: what each rank's attention layers store, by layer name, in the model's order.
    available_bytes: what each rank can give to the cache.
    max_model_len: tokens; one request of so many must fit, in addition to the null block.
    fit_max_model_len: if it does not fit, the plan has the largest max_model_len that does.
    max_tokens_in_flight: the most tokens of one request that are scheduled and not confirmed.
    num_blocks_override: this many blocks regardless of memory, null block included.
    tables: the memory budget of each rank from `worker.memory`; for the error text only.
    num_stages: of the pipeline; as many successive ranks each, which have the same layers.

    A layer whose window or chunk is no shorter than `max_model_len` is planned as full attention: it masks nothing, and
    fitting only lowers `max_model_len`. If layers have pages of different sizes, the smaller pages get more tokens a
    block, until all have the size of the largest.

    Layers of one spec form groups of one size, in the model's order; the last of a spec may be shorter, and the tensors
    beyond it are then unused in its blocks. Small groups leave few pages unused, but each group has a block table that
    every step reads and extends. So the group size is the one for which a request of `max_model_len` takes the fewest
    pages, unused ones included and 2% added for each group; of equals the largest. All layers of a uniform model are
    one group; 2 and 4 layers make three groups of two; 4 of full attention and 22 with a window of 512 make seven
    groups of four, of which the last has two. In a pipeline every stage has its share of every group, so that no stage
    has more tensors than its layers need.

    Raises `ConfigError` if ranks disagree on a layer or pages do not divide each other, `CapacityError` (with option
    values that would work, see `capacity`) if one request of max_model_len does not fit, or with `fit_max_model_len`
    not even one of two tokens.
    """
    assert len(specs) == len(available_bytes) > 0, "one spec table and one number of bytes a rank"
    stages = _merged(specs, num_stages)
    layers = _with_pages_of_one_size(_without_idle_windows(_union(stages), max_model_len))
    plan = KVCacheConfig(
        num_blocks=num_blocks_override or 0,
        groups=_form_groups(layers, stages, max_model_len, max_tokens_in_flight),
        max_model_len=max_model_len,
        max_tokens_in_flight=max_tokens_in_flight,
    )
    block_bytes = [plan.of_layers(of_rank.keys()).block_bytes for of_rank in specs]
    room = [max(free, 0) // size for free, size in zip(available_bytes, block_bytes, strict=True)]
    if num_blocks_override is None:
        plan = msgspec.structs.replace(plan, num_blocks=min(room))
    fits = plan.max_num_tokens(plan.num_blocks - 1)  # block 0 is the null block
    least = min(_SMALLEST_CONTEXT, max_model_len) if fit_max_model_len else max_model_len
    if fits < least:
        if num_blocks_override is not None:
            raise too_few_blocks(plan, least, fits)
        poorest = min(range(len(specs)), key=lambda rank: (room[rank], available_bytes[rank]))
        own = plan.of_layers(specs[poorest].keys())
        raise too_little_memory(own, least, fits, available_bytes[poorest], tables[poorest] if tables else {})
    return msgspec.structs.replace(plan, max_model_len=fits)


def plan_without_limit(
    specs: dict[str, KVCacheSpec], *, max_model_len: int, max_tokens_in_flight: int
) -> KVCacheConfig:
    """The KV cache groups of the layers, which do not depend on the amount of memory."""
    return plan_kv_cache(
        [specs],
        [_MORE_THAN_ANY_HOST_HAS],
        max_model_len=max_model_len,
        fit_max_model_len=False,
        max_tokens_in_flight=max_tokens_in_flight,
        num_blocks_override=None,
    )


# ---------------------------------------------------------------------------------------------------------------
# What the layers store.


def _merged(specs: Sequence[dict[str, KVCacheSpec]], num_stages: int) -> list[dict[str, KVCacheSpec]]:
    """The specs of every stage's layers. Its ranks hold an equal part of each of them, and all ranks share block
    ids."""
    ranks_per_stage = len(specs) // num_stages
    stages = specs[::ranks_per_stage]
    if not any(stages):
        raise ConfigError("model: it has no attention layer, so no KV cache can be planned", option="model", value=None)
    if not all(stages):
        empty = next(index for index, stage in enumerate(stages) if not stage)
        raise ConfigError(
            f"KV cache: stage {empty} of {num_stages} has no attention layer, and every stage must hold KV; lower "
            "pipeline_parallel_size",
            option="pipeline_parallel_size",
            value=num_stages,
        )
    for rank, table in enumerate(specs):
        first = stages[rank // ranks_per_stage]
        if table.keys() != first.keys():
            odd = sorted(table.keys() ^ first.keys())
            raise ConfigError(
                f"KV cache: rank {rank - rank % ranks_per_stage} has {len(first)} attention layers and rank {rank} has "
                f"{len(table)}; they differ in {', '.join(odd[:4])}; each of the {ranks_per_stage} ranks of a stage "
                "must hold a part of every layer",
                option="tensor_parallel_size",
                value=ranks_per_stage,
            )
        for name, spec in table.items():
            if spec != first[name]:
                raise ConfigError(
                    f"KV cache: layer {name} is {_describe(first[name])} on rank {rank - rank % ranks_per_stage} and "
                    f"{_describe(spec)} on rank {rank}; give a tensor_parallel_size that splits its KV heads evenly",
                    option="tensor_parallel_size",
                    value=ranks_per_stage,
                )
    return list(stages)


def _union(stages: Sequence[dict[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    return {name: spec for stage in stages for name, spec in stage.items()}


def _without_idle_windows(layers: Mapping[str, KVCacheSpec], max_model_len: int) -> dict[str, KVCacheSpec]:
    def visible(spec: KVCacheSpec) -> KVCacheSpec:
        if not isinstance(spec, LocalAttentionSpec) or spec.most_seen < max_model_len:
            return spec
        shape = spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype
        return FullAttentionSpec(*shape, spec.v_head_size, spec.is_fp8)

    return {name: visible(spec) for name, spec in layers.items()}


def _with_pages_of_one_size(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The layers with block sizes multiplied until every page is as large as the largest."""
    largest = max(layers, key=lambda name: layers[name].page_size_bytes)
    page_bytes = layers[largest].page_size_bytes
    same: dict[str, KVCacheSpec] = {}
    for name, spec in layers.items():
        factor, rest = divmod(page_bytes, spec.page_size_bytes)
        if rest:
            raise _do_not_divide(layers, name, largest, f"{page_bytes} bytes is no multiple of {spec.page_size_bytes}")
        same[name] = msgspec.structs.replace(spec, block_size=spec.block_size * factor)
    smallest = min(same, key=lambda name: same[name].block_size)
    for name, spec in same.items():
        if spec.block_size % same[smallest].block_size:  # prefix lookup works at ends of the smallest blocks
            sizes = f"{spec.block_size} tokens in a page is no multiple of {same[smallest].block_size}"
            raise _do_not_divide(layers, name, smallest, sizes)
    return same


def _do_not_divide(layers: Mapping[str, KVCacheSpec], name: str, other: str, numbers: str) -> ConfigError:
    return ConfigError(
        f"KV cache: layer {name} is {_describe(layers[name])} and layer {other} is {_describe(layers[other])}: "
        f"{numbers}, so they cannot share memory; use a model whose attention layers store multiples of each other",
        option="model",
        value=name,
    )


def _describe(spec: KVCacheSpec) -> str:
    """Its fields; those that are None, or not so, are left out."""
    fields = msgspec.structs.asdict(spec).items()
    numbers = {name: value for name, value in fields if value is not None and value is not False}
    heads = numbers.pop("num_kv_heads", None)
    first, *others = [f"{name} {value}" for name, value in numbers.items()]
    return f"({', '.join([first, 'latents' if heads is None else f'{heads} KV heads', *others])})"


# ---------------------------------------------------------------------------------------------------------------
# Groups.


def _form_groups(
    layers: Mapping[str, KVCacheSpec],
    stages: Sequence[Collection[str]],
    max_model_len: int,
    max_tokens_in_flight: int,
) -> list[KVCacheGroup]:
    """stages: the names of each one's layers."""
    names_of: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        names_of.setdefault(spec, []).append(name)
    size = _group_size(
        [(len(names), spec.blocks_needed(max_model_len, max_tokens_in_flight)) for spec, names in names_of.items()]
    )
    return [
        KVCacheGroup(layer_names=names, spec=spec)
        for spec, of_spec in names_of.items()
        for names in _shared_out(of_spec, stages, size)
    ]


def _shared_out(names: Sequence[str], stages: Sequence[Collection[str]], size: int) -> list[list[str]]:
    """Layers of one spec as groups of at most about `size`, to which each stage gives as many of its own."""
    groups: list[list[str]] = [[] for _ in range(0, len(names), size)]
    for stage in stages:
        own = [name for name in names if name in stage]
        part = -(-len(own) * size // len(names))
        for group, begin in zip(groups, range(0, len(own), part or 1), strict=False):
            group += own[begin : begin + part]
    return groups


def _group_size(kinds: Sequence[tuple[int, int]]) -> int:
    """How many layers a group has, by the rule of `plan_kv_cache`. kinds: for each spec its number of layers, and the
    blocks that one request takes in each of its groups.
    """

    def price(size: int) -> int:
        num_groups = [-(-num_layers // size) for num_layers, _ in kinds]
        num_pages = size * sum(n * num_blocks for n, (_, num_blocks) in zip(num_groups, kinds, strict=True))
        return num_pages * (100 + _GROUP_PRICE_PERCENT * sum(num_groups))

    return min(range(max(num_layers for num_layers, _ in kinds), 0, -1), key=price)
