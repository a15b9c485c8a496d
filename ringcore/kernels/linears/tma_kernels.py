"""`skinny_linear` for 2 or more rows on Hopper: weights by TMA, of which a program has a ring of tiles in shared memory
before the rows are there.

Triton's pipeliner loads weights and rows of a block of inputs together, after the wait for the kernel before
(`dependent_launch`). In Gluon the two are apart: a program fills its ring with weights, waits, and loads the rows. So
memory is busy while kernels follow each other: a layer of Qwen3-8B takes 7% less at 8 and 32 rows than with
`dot_kernel`. Gluon has no interpreter: `skinny_linear_reference` is compared with this kernel on a GPU alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ringcore.kernels.activation import activated
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait

__all__ = ["tma_kernel"]

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the latter: Triton 3.6


@gluon.jit
def _place(at, begin, blocks: gl.constexpr, splits: gl.constexpr, is_even: gl.constexpr):
    """-> the tile of a program's block `at`, and its place among all blocks of inputs of the tile."""
    if is_even:
        return (begin + at) // blocks, (begin + at) % blocks
    item = gl.program_id(0) + at // blocks * gl.num_programs(0)
    return item // splits, item % splits * blocks + at % blocks


@gluon.jit
def _load_weights(
    weight, stage, loaded, tile, block, is_there,
    block_weights: gl.constexpr, block_inputs: gl.constexpr, is_gated: gl.constexpr,
):  # fmt: skip
    first = block * block_inputs
    if is_gated:
        pairs: gl.constexpr = block_weights // 16
        rows = stage._reinterpret(weight.dtype, [pairs, 2, 8, block_inputs], weight.layout)
        tma.async_copy_global_to_shared(weight, [tile * pairs, 0, 0, first], loaded, rows, pred=is_there)
    else:
        tma.async_copy_global_to_shared(weight, [tile * block_weights, first], loaded, stage, pred=is_there)


@gluon.jit
def _contributors(tile, num_tiles, blocks: gl.constexpr):
    """-> which program has the first block of a tile, and how many programs have some, of even ranges."""
    programs = gl.num_programs(0)
    first = ((tile * blocks + 1) * programs - 1) // (num_tiles * blocks)
    return first, ((tile + 1) * blocks * programs - 1) // (num_tiles * blocks) - first + 1


@gluon.jit
def _weight_rows(tile, num_outputs, block_weights: gl.constexpr, is_gated: gl.constexpr, layout: gl.constexpr):
    """The rows of the weight that a tile has: [block_weights], all in bounds."""
    index = gl.arange(0, block_weights, layout)
    if is_gated:
        outputs = gl.minimum(tile * (block_weights // 2) + index // 16 * 8 + index % 8, num_outputs - 1)
        outputs += index // 8 % 2 * num_outputs
    else:
        outputs = gl.minimum(tile * block_weights + index, num_outputs - 1)
    return outputs


@gluon.jit
def _group_scales(values, rows, row_stride, group_stride, at, group: gl.constexpr, num_groups: gl.constexpr):
    """Of rows, for the group of input `at`."""
    values += rows * row_stride
    if num_groups > 1:
        values += at // group * group_stride
    return gl.load(values)


@gluon.jit
def _scales(
    scales, tile, at, num_rows, num_outputs, num_inputs: gl.constexpr,
    block_weights: gl.constexpr, block_rows: gl.constexpr, is_gated: gl.constexpr,
    groups: gl.constexpr, summed: gl.constexpr,
):  # fmt: skip
    """Of the FP8 block from input `at` on: of rows, and of a tile's outputs."""
    row_groups: gl.constexpr = num_inputs // groups[0]
    rows = gl.minimum(gl.arange(0, block_rows, gl.SliceLayout(0, summed)), num_rows - 1)
    of_rows = _group_scales(scales[0], rows, row_groups, 1, at, groups[0], row_groups)
    outputs = _weight_rows(tile, num_outputs, block_weights, is_gated, gl.SliceLayout(1, summed))
    of_outputs = _group_scales(scales[1], outputs // groups[3], scales[2], scales[3], at, groups[1], groups[2])
    return of_rows, of_outputs


@gluon.jit
def _epilogue(
    total,  # [block_weights, block_rows] float32
    bias, out, tile, num_rows, num_outputs,
    block_weights: gl.constexpr, block_rows: gl.constexpr,
    has_bias: gl.constexpr, is_gated: gl.constexpr, is_gelu: gl.constexpr, adds: gl.constexpr,
):  # fmt: skip
    """As `skinny_kernels`' one; a thread has gate and up of an output."""
    block_outputs: gl.constexpr = block_weights // 2 if is_gated else block_weights
    if has_bias:
        layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
        weight_rows = _weight_rows(tile, num_outputs, block_weights, is_gated, layout)
        total += gl.load(bias + weight_rows).to(gl.float32)[:, None]
    if is_gated:
        pairs = gl.reshape(total, [block_outputs // 8, 2, 8, block_rows])
        gate, up = gl.split(gl.permute(pairs, (0, 2, 3, 1)))
        total = gl.reshape(activated(gate, is_gelu) * up, [block_outputs, block_rows])
    outputs = tile * block_outputs + gl.arange(0, block_outputs, gl.SliceLayout(1, total.type.layout))
    rows = gl.arange(0, block_rows, gl.SliceLayout(0, total.type.layout))
    in_bounds = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    targets = out + rows.to(gl.int64)[None, :] * num_outputs + outputs[:, None]
    if adds:
        total += gl.load(targets, mask=in_bounds, other=0.0).to(gl.float32)
    gl.store(targets, total.to(out.dtype.element_ty), mask=in_bounds)


@gluon.jit
def _reduce(
    total, partials, counters, tile, split, count,
    block_weights: gl.constexpr, block_rows: gl.constexpr, slots: gl.constexpr,
):  # fmt: skip
    """-> the sum of a tile's `count` partials, of which `total` is one, and whether this program arrived last and has
    it."""
    size: gl.constexpr = block_weights * block_rows
    down = gl.arange(0, block_weights, gl.SliceLayout(1, total.type.layout))[:, None]
    across = gl.arange(0, block_rows, gl.SliceLayout(0, total.type.layout))[None, :]
    of_tile = partials + tile * (slots * size) + down * block_rows + across
    gl.store(of_tile + split * size, total)
    _barrier()
    arrived = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == count - 1:
        total = gl.load(of_tile, cache_modifier=".cg")
        for other in gl.static_range(1, slots):
            total += gl.load(of_tile + other * size, mask=other < count, other=0.0, cache_modifier=".cg")
        gl.store(counters + tile, 0)
    return total, arrived == count - 1


@gluon.jit(do_not_specialize=["num_rows", "num_outputs", "num_items"])
def tma_kernel(
    x,  # descriptor of [num_rows, num_inputs], blocks of [block_rows, block_inputs]
    weight,  # descriptor of [num_outputs, num_inputs], blocks of [block_weights, block_inputs]; gated: see `tma_linear`
    scales,  # of FP8 those of x, of the weight, and the strides of these; else ()
    bias,  # [num_outputs], or gated; read where has_bias
    out,  # [num_rows, num_outputs]
    partials,  # [tiles, slots, block_weights, block_rows] float32, of any content; deferred: [slots, *out's shape]
    counters,  # [tiles] int32, all 0, and 0 again afterwards
    num_rows,  # int, block_rows at most
    num_outputs,  # int
    num_items,  # tiles * splits
    num_inputs: gl.constexpr,
    block_rows: gl.constexpr,
    block_inputs: gl.constexpr,  # times splits, it divides num_inputs
    block_weights: gl.constexpr,
    splits: gl.constexpr,  # of is_even 1
    slots: gl.constexpr,  # partials of a tile: splits; of is_even at most so many
    is_even: gl.constexpr,
    num_stages: gl.constexpr,
    num_warps: gl.constexpr,
    groups: gl.constexpr,  # of FP8: inputs of a group of x, of one of the weight, how many, outputs that share; else ()
    is_deferred: gl.constexpr,  # partials are the result
    has_bias: gl.constexpr,
    is_gated: gl.constexpr,
    is_gelu: gl.constexpr,
    adds: gl.constexpr,
    pdl: gl.constexpr,
):
    """A persistent program takes items (tile, split) at a distance of the number of programs, as one sequence of blocks
    of inputs that runs through a ring of num_stages. is_even: it takes an equal range of the blocks of all tiles
    instead, which may begin and end within a tile (Stream-K: Osama et al., 2023). Of the programs that have a part of a
    tile the last to arrive reduces all partials, always in the same order."""
    blocks: gl.constexpr = num_inputs // block_inputs // splits
    number_bytes: gl.constexpr = x.dtype.primitive_bitwidth // 8
    stage_bytes: gl.constexpr = (block_weights + block_rows) * block_inputs * number_bytes
    stored: gl.constexpr = gl.NVMMASharedLayout.get_default_for([block_weights, block_inputs], x.dtype)
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, block_rows, 32 // number_bytes])
    weights = gl.allocate_shared_memory(x.dtype, [num_stages, block_weights, block_inputs], stored)
    rows = gl.allocate_shared_memory(x.dtype, [num_stages, block_rows, block_inputs], x.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if is_even:
        begin = program * (num_items * blocks) // programs
        total_blocks = (program + 1) * (num_items * blocks) // programs - begin
    else:
        begin = 0
        total_blocks = (num_items - program + programs - 1) // programs * blocks
    if pdl:
        gdc_launch_dependents()
    for i in gl.static_range(num_stages):
        mbarrier.init(loaded.index(i), count=1)
    _barrier()
    for i in gl.static_range(num_stages):
        tile, block = _place(i, begin, blocks, splits, is_even)
        mbarrier.expect(loaded.index(i), stage_bytes, pred=i < total_blocks)
        to = weight, weights.index(i), loaded.index(i), tile, block, i < total_blocks
        _load_weights(*to, block_weights, block_inputs, is_gated)
    if pdl:
        gdc_wait()
    for i in gl.static_range(num_stages):
        _, block = _place(i, begin, blocks, splits, is_even)
        to_rows = rows.index(i)
        tma.async_copy_global_to_shared(x, [0, block * block_inputs], loaded.index(i), to_rows, pred=i < total_blocks)
    total = gl.zeros([block_weights, block_rows], gl.float32, summed)
    for at in range(total_blocks):
        slot = at % num_stages
        tile, block = _place(at, begin, blocks, splits, is_even)
        is_first = (block % blocks == 0) | (at == 0)
        if len(groups) > 0:  # on their way while the stage is waited for
            of_block = scales, tile, block * block_inputs, num_rows, num_outputs
            of_rows, of_outputs = _scales(*of_block, num_inputs, block_weights, block_rows, is_gated, groups, summed)
        mbarrier.wait(loaded.index(slot), at // num_stages & 1)
        columns = rows.index(slot).permute((1, 0))
        if len(groups) > 0:
            # Hopper's tensor cores sum FP8 in fewer bits: each block in them, blocks in float32.
            products = warpgroup_mma(weights.index(slot), columns, total, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, deps=(products,)) * (of_outputs[:, None] * of_rows[None, :])
            total = gl.where(is_first, products, total + products)
        else:
            total = warpgroup_mma(weights.index(slot), columns, total, use_acc=is_first == 0, is_async=True)
            total = warpgroup_mma_wait(0, deps=(total,))
        _barrier()  # all warps have read the stage
        ahead = at + num_stages
        next_tile, next_block = _place(ahead, begin, blocks, splits, is_even)
        is_ahead = ahead < total_blocks
        mbarrier.expect(loaded.index(slot), stage_bytes, pred=is_ahead)
        of_next = loaded.index(slot), next_tile, next_block, is_ahead
        _load_weights(weight, weights.index(slot), *of_next, block_weights, block_inputs, is_gated)
        to_rows = rows.index(slot)
        tma.async_copy_global_to_shared(x, [0, next_block * block_inputs], loaded.index(slot), to_rows, pred=is_ahead)
        if (block % blocks == blocks - 1) | (at == total_blocks - 1):
            if is_even:
                first_program, count = _contributors(tile, num_items, blocks)
                split = program - first_program
            else:
                split, count = block // blocks, splits
            if is_deferred:
                of_split = partials + split.to(gl.int64) * num_rows * num_outputs
                _epilogue(
                    *(total, bias, of_split, tile, num_rows, num_outputs, block_weights, block_rows),
                    False, False, False, False,
                )  # fmt: skip
                if split == count - 1:
                    nothing = gl.zeros([block_weights, block_rows], gl.float32, summed)
                    for unused in range(count, slots):
                        of_slot = partials + unused * num_rows * num_outputs
                        _epilogue(
                            *(nothing, bias, of_slot, tile, num_rows, num_outputs, block_weights, block_rows),
                            False, False, False, False,
                        )  # fmt: skip
            else:
                is_complete = count == 1
                if slots > 1:  # noqa: SIM102, of which the first is a constant
                    if count > 1:
                        total, is_complete = _reduce(
                            total, partials, counters, tile, split, count, block_weights, block_rows, slots
                        )
                if is_complete:
                    _epilogue(
                        *(total, bias, out, tile, num_rows, num_outputs, block_weights, block_rows),
                        has_bias, is_gated, is_gelu, adds,
                    )  # fmt: skip
