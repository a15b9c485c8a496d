// Attention to a long context in persistent_layers.cu, by tensor cores: a program has all query heads of a KV head, up to
// eight, so that keys and values are read once.

// A warp has 16 tokens of a tile and sums of its own, which are merged at the end of the split.
struct LongAttention {
    static constexpr int HEADS = LongTiles::HEADS, TILE = LongTiles::TILE;
    using Warp = WarpAttention<HEADS>;
    static constexpr int AT_ONCE = 2;  // heads whose sums are merged at once
    static constexpr int VALUES_AT = Attention::MAXIMA_AT + 8 * NUM_WARPS * AT_ONCE, QUERIES_AT = VALUES_AT;
    static_assert(LongTiles::WARP_TOKENS == 16);
    static_assert(VALUES_AT + 4 * NUM_WARPS * AT_ONCE * HEAD_SIZE <= SCRATCH_AT + SCRATCH_BYTES);

    const Attention& of_row;

    __device__ __forceinline__ LongAttention(const Attention& of_row) : of_row(of_row) {}

    __device__ __forceinline__ void attend(const Program& program, Slots& ring, u16* kv_cache, const void* gains, u32 tag) {
        const Split& split = of_row.split;
        of_row.load_heads<HEADS>(program, QUERIES_AT, kv_cache, gains, tag);
        Warp of_warp(program, QUERIES_AT);
        const int in_tile = program.warp * 16, slot = in_tile / SLOT_TOKENS, length = split.context.length;
#pragma unroll 1
        for (int tile = split.first; tile < split.end; tile++) {
            wait_for_slots<LongTiles::TILE_SLOTS>(program, ring);
            const u32 keys = ring.bytes(program, slot) + in_tile % SLOT_TOKENS * Warp::ROW_BYTES;
            const int token = tile * TILE + in_tile;
            if (token + 16 >= length) Warp::complete(program, keys, program.base + Attention::KEY_AT, token, length);
            of_warp.attend(program, keys, token, length);
            leave_slots<LongTiles::TILE_SLOTS>(program, ring);
        }
        merge(program, of_warp, tag);
    }

    // AT_ONCE heads after the other: lanes of which lane % 4 is the same have their sums of values.
    __device__ __forceinline__ void merge(const Program& program, Warp& of, u32 tag) const {
        const int lane = program.lane;
        float* const of_warps = (float*)(program.shared + Attention::MAXIMA_AT) + 2 * AT_ONCE * program.warp;
        float* const sums = (float*)(program.shared + VALUES_AT) + AT_ONCE * HEAD_SIZE * program.warp;
        of.add_totals();
        constexpr int TURNS = (HEADS + AT_ONCE - 1) / AT_ONCE;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            program.sync();
            if (lane % 4 == 0 && lane / 8 == turn) {
                of_warps[lane / 4 % 2 * 2] = of.maximum;
                of_warps[lane / 4 % 2 * 2 + 1] = of.total;
            }
            if (lane % 4 == turn)
#pragma unroll
                for (int i = 0; i < Warp::OUTS; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sums[j % 2 * HEAD_SIZE + 16 * i + j / 2 * 8 + lane / 4] = of.out[i][j];
            const int head = of_row.split.first_head + AT_ONCE * turn;
            if (HEADS % AT_ONCE && turn == TURNS - 1) of_row.merge_warps<1, AT_ONCE>(program, head, tag);
            else of_row.merge_warps<AT_ONCE>(program, head, tag);
        }
    }
};
