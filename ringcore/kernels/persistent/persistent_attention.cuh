// Attention to a short context in persistent_layers.cu.

// Of a tile of the program's split a warp has WARP_TOKENS. A key or value is spread over LANES lanes.
struct ShortAttention {
    static constexpr int HEADS = ShortTiles::HEADS, TILE = ShortTiles::TILE, WARP_TOKENS = ShortTiles::WARP_TOKENS;
    static constexpr int LANES = HEAD_SIZE / 8, TOKENS = 32 / LANES, LOADS = WARP_TOKENS / TOKENS;
    static constexpr int VALUES_AT = Attention::MAXIMA_AT + 8 * NUM_WARPS * HEADS;
    static constexpr int QUERIES_AT = VALUES_AT + 4 * NUM_WARPS * HEADS * HEAD_SIZE, WEIGHTS_AT = QUERIES_AT + 4 * HEADS * HEAD_SIZE;
    static_assert(WEIGHTS_AT + 4 * TILE * HEADS <= SCRATCH_AT + SCRATCH_BYTES && VALUES_AT % 16 == 0);
    static constexpr int AT_ONCE = HEADS < 4 ? HEADS : 4;  // whose scores are computed at once

    const Attention& of_row;
    uint4 keys[LOADS], values[LOADS];  // of a tile

    __device__ __forceinline__ ShortAttention(const Attention& of_row) : of_row(of_row) {}

    // Of the lane's i-th key or value of a tile.
    __device__ __forceinline__ int token_of(const Program& program, int tile, int i) const {
        return tile * TILE + program.warp * WARP_TOKENS + i * TOKENS + program.lane / LANES;
    }

    __device__ __forceinline__ void load_tile(const Program& program, const Slots& ring, int tile) {
        const int length = of_row.split.context.length, in_tile = token_of(program, 0, 0), slot = program.warp * WARP_TOKENS / SLOT_TOKENS;
        const u32 from = ring.bytes(program, slot) + 2 * (in_tile % SLOT_TOKENS) * HEAD_SIZE + program.lane % LANES * 16;
        const u32 own = program.base + Attention::KEY_AT + program.lane % LANES * 16;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int token = token_of(program, tile, i);
            keys[i] = values[i] = make_uint4(0, 0, 0, 0);
            if (token >= length) continue;
            const bool is_own = token == length - 1;
            const u32 at = is_own ? own : from + 2 * i * TOKENS * HEAD_SIZE;
            keys[i] = load_16(at);
            values[i] = load_16(at + (is_own ? 2 * HEAD_SIZE : SLOT_VALUES_AT));
        }
    }

    static __device__ __forceinline__ void expand(const uint4& pairs, float* numbers) {
#pragma unroll
        for (int d = 0; d < 4; d++) {
            numbers[2 * d] = low_half((&pairs.x)[d], TYPE);
            numbers[2 * d + 1] = high_half((&pairs.x)[d], TYPE);
        }
    }

    // Of a tile's keys and AT_ONCE query heads the lane's share of the scores: of eight numbers from `from` on.
    __device__ __forceinline__ void score(const Program& program, int from_head, int from, float (*scores)[LOADS]) const {
        float query[AT_ONCE][8];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (int d = 0; d < 8; d += 4) {
                const int head = min(from_head + j, HEADS - 1);
                const uint4 found = load_16(program.base + QUERIES_AT + 4 * (head * HEAD_SIZE + from + d));
#pragma unroll
                for (int k = 0; k < 4; k++) query[j][d + k] = __uint_as_float((&found.x)[k]);
            }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            float key[8];
            expand(keys[i], key);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                scores[j][i] = 0;
#pragma unroll
                for (int d = 0; d < 8; d++) scores[j][i] = fmaf(key[d], query[j][d], scores[j][i]);
            }
        }
    }

    __device__ __forceinline__ void attend(const Program& program, Slots& ring, u16* kv_cache, const void* gains, u32 tag) {
        const Split& split = of_row.split;
        of_row.load_heads<HEADS>(program, QUERIES_AT, kv_cache, gains, tag);
        const int lane = program.lane, from = lane % LANES * 8;
        float maxima[HEADS], totals[HEADS], weighted[HEADS][8];
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            maxima[g] = -1e30f;
            totals[g] = 0;
#pragma unroll
            for (int d = 0; d < 8; d++) weighted[g][d] = 0;
        }
        float* const weights = (float*)(program.shared + WEIGHTS_AT) + program.warp * WARP_TOKENS * HEADS;
        // After the reduction a lane has the scores of one token, which is its key of this index.
        constexpr int SAME = LANES / LOADS;
        const int own = lane % LANES / SAME;
#pragma unroll 1
        for (int tile = split.first; tile < split.end; tile++) {
            wait_for_slots<ShortTiles::TILE_SLOTS>(program, ring);
            load_tile(program, ring, tile);
            leave_slots<ShortTiles::TILE_SLOTS>(program, ring);
            const bool is_token = token_of(program, tile, own) < split.context.length;
#pragma unroll
            for (int from_head = 0; from_head < HEADS; from_head += AT_ONCE) {
                float scores[AT_ONCE][LOADS];
                score(program, from_head, from, scores);
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    const int g = from_head + j;
                    if (g >= HEADS) break;
                    const float sum = sum_over_lanes<LOADS, LANES>(scores[j], lane), score = is_token ? sum : -1e30f;
                    float maximum = fmaxf(maxima[g], score);
#pragma unroll
                    for (int lanes = SAME; lanes < 32; lanes *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
                    const float factor = exp2f(maxima[g] - maximum), weight = is_token ? exp2f(score - maximum) : 0;
                    maxima[g] = maximum;
                    totals[g] = totals[g] * factor + weight;
#pragma unroll
                    for (int d = 0; d < 8; d++) weighted[g][d] *= factor;
                    if (lane % SAME == 0) weights[(own * TOKENS + lane / LANES) * HEADS + g] = weight;
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                float value[8];
                expand(values[i], value);
#pragma unroll
                for (int g = 0; g < HEADS; g++) {
                    const float weight = weights[(i * TOKENS + lane / LANES) * HEADS + g];
#pragma unroll
                    for (int d = 0; d < 8; d++) weighted[g][d] = fmaf(value[d], weight, weighted[g][d]);
                }
            }
            __syncwarp();
        }
        store_sums(program, maxima, totals, weighted);
        of_row.merge_warps<HEADS>(program, split.first_head, tag);
    }

    // A warp's, to shared memory.
    __device__ __forceinline__ void store_sums(
        const Program& program, const float* maxima, float* totals, float (*weighted)[8]
    ) const {
        const int lane = program.lane, from = lane % LANES * 8;
        float* const of_warps = (float*)(program.shared + Attention::MAXIMA_AT);
        float* const sums = (float*)(program.shared + VALUES_AT);
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
#pragma unroll
            for (int lanes = LANES / LOADS; lanes < 32; lanes *= 2) totals[g] += __shfl_xor_sync(~0u, totals[g], lanes);
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2)
#pragma unroll
                for (int d = 0; d < 8; d++) weighted[g][d] += __shfl_xor_sync(~0u, weighted[g][d], lanes);
            if (lane == 0) {
                of_warps[2 * (program.warp * HEADS + g)] = maxima[g];
                of_warps[2 * (program.warp * HEADS + g) + 1] = totals[g];
            }
            if (lane < LANES)
#pragma unroll
                for (int d = 0; d < 8; d++) sums[(program.warp * HEADS + g) * HEAD_SIZE + from + d] = weighted[g][d];
        }
    }
};
