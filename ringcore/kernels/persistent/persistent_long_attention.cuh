// Attention to a long context in persistent_layers.cu, by tensor cores: a program has all query heads of a KV head, up to
// eight, so that keys and values are read once.

// A warp has 16 tokens of a tile and sums of its own, which are merged at the end of the split. Scores are [heads, tokens],
// of which a lane has four of head lane / 4, so that weights are the second factor of the other product as they are:
// values transposed [HEAD_SIZE, tokens] times weights [tokens, heads].
struct LongAttention {
    static constexpr int HEADS = LongTiles::HEADS, TILE = LongTiles::TILE, ROW_BYTES = 2 * HEAD_SIZE;
    static constexpr int CHUNKS = HEAD_SIZE / 32;  // of eight numbers, of a lane of a key
    static constexpr int OUTS = HEAD_SIZE / 16;
    static constexpr int AT_ONCE = 2;  // heads whose sums are merged at once
    static constexpr int VALUES_AT = Attention::MAXIMA_AT + 8 * NUM_WARPS * AT_ONCE, QUERIES_AT = VALUES_AT;
    static_assert(HEADS <= 8 && LongTiles::WARP_TOKENS == 16);
    static_assert(VALUES_AT + 4 * NUM_WARPS * AT_ONCE * HEAD_SIZE <= SCRATCH_AT + SCRATCH_BYTES);

    const Attention& of_row;
    u32 query[4 * CHUNKS];  // pairs
    float out[OUTS][4];     // of two heads

    __device__ __forceinline__ LongAttention(const Attention& of_row) : of_row(of_row) {}

    // In the order in which a lane has a key: chunks lane % 4, lane % 4 + 4, ...
    __device__ __forceinline__ void load_query(const Program& program) {
        const int head = program.lane / 4;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const u32 from = program.base + QUERIES_AT + 4 * (head * HEAD_SIZE + 8 * (program.lane % 4 + 4 * i));
            const uint4 low = load_16(from), high = load_16(from + 16);
            const u32 numbers[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                query[4 * i + j] = head < HEADS ? to_pair(__uint_as_float(numbers[2 * j]), __uint_as_float(numbers[2 * j + 1]), TYPE) : 0;
        }
    }

    // The key and value of this step, and zeros for what is behind it, to a tile from `token` on, of which the cache has
    // neither.
    __device__ __forceinline__ void complete(const Program& program, u32 keys, int token) const {
        for (int i = program.lane; i < 16 * (ROW_BYTES / 16); i += 32) {
            const int own = token + i / (ROW_BYTES / 16) - (of_row.split.context.length - 1);
            if (own < 0) continue;
            uint4 key = make_uint4(0, 0, 0, 0), value = key;
            if (own == 0) {
                const u32 from = program.base + Attention::KEY_AT + i % (ROW_BYTES / 16) * 16;
                key = load_16(from);
                value = load_16(from + ROW_BYTES);
            }
            store_16(keys + 16 * i, key.x, key.y, key.z, key.w);
            store_16(keys + 16 * i + SLOT_VALUES_AT, value.x, value.y, value.z, value.w);
        }
        fence_copies();
        __syncwarp();
    }

    // Of 64 numbers of eight values, from `from` on, the pairs of tokens that a lane has of each chunk. Row r of matrix j is
    // chunk j ^ r, so that the rows of a matrix lie in different banks.
    static __device__ __forceinline__ void load_values(const Program& program, u32 from, u32* chunks) {
        const int row = program.lane % 8, pair = program.lane % 4;
        u32 found[8], even[8];
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            load_transposed(found + j, from + row * ROW_BYTES + ((j + program.lane / 8) ^ row) * 16);
#pragma unroll
        for (int j = 0; j < 8; j++) even[j] = __byte_perm(found[j], found[j ^ 1], 0x7610);  // both tokens' chunk j ^ 2 * pair
#pragma unroll
        for (int j = 0; j < 8; j++) found[j] = pair & 1 ? even[j ^ 2] : even[j];
#pragma unroll
        for (int j = 0; j < 8; j++) chunks[j] = pair & 2 ? found[j ^ 4] : found[j];
    }

    __device__ __forceinline__ void add_values(const Program& program, u32 values, u32 first_weights, u32 second_weights) {
#pragma unroll
        for (int i = 0; i < HEAD_SIZE / 64; i++) {
            u32 first[8], second[8];  // of eight tokens each
            load_values(program, values + 128 * i, first);
            load_values(program, values + 128 * i + 8 * ROW_BYTES, second);
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply_16_bits(
                    out[4 * i + j], first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1], first_weights, second_weights,
                    TYPE
                );
        }
    }

    __device__ __forceinline__ void attend(const Program& program, Slots& ring, u16* kv_cache, const void* gains, u32 tag) {
        const Split& split = of_row.split;
        of_row.load_heads<HEADS>(program, QUERIES_AT, kv_cache, gains, tag);
        load_query(program);
#pragma unroll
        for (int i = 0; i < OUTS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) out[i][j] = 0;
        float maximum = -1e30f, total = 0;  // of head lane / 4; the latter of the lane's tokens
        const int lane = program.lane, in_tile = program.warp * 16, slot = in_tile / SLOT_TOKENS;
#pragma unroll 1
        for (int tile = split.first; tile < split.end; tile++) {
            wait_for_slots<LongTiles::TILE_SLOTS>(program, ring);
            const u32 keys = ring.bytes(program, slot) + in_tile % SLOT_TOKENS * ROW_BYTES;
            const int token = tile * TILE + in_tile;
            if (token + 16 >= split.context.length) complete(program, keys, token);
            float weights[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    const uint4 key = load_16(keys + (8 * n + lane / 4) * ROW_BYTES + 16 * (lane % 4 + 4 * i));
                    multiply_16_bits(weights[n], query[4 * i], 0, query[4 * i + 1], 0, key.x, key.y, TYPE);
                    multiply_16_bits(weights[n], query[4 * i + 2], 0, query[4 * i + 3], 0, key.z, key.w, TYPE);
                }
            const float factor = to_weights(token, lane, weights, maximum, total);
            const float factors[] = {__shfl_sync(~0u, factor, lane % 4 * 8), __shfl_sync(~0u, factor, lane % 4 * 8 + 4)};
#pragma unroll
            for (int i = 0; i < OUTS; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) out[i][j] *= factors[j % 2];
            add_values(program, keys + SLOT_VALUES_AT, to_pair(weights[0][0], weights[0][1], TYPE),
                       to_pair(weights[1][0], weights[1][1], TYPE));
            leave_slots<LongTiles::TILE_SLOTS>(program, ring);
        }
        merge(program, maximum, total, tag);
    }

    // Scores to weights, whose maximum this changes. Returns what multiplies the sums before.
    __device__ __forceinline__ float to_weights(int token, int lane, float (*scores)[4], float& maximum, float& total) const {
        const float before = maximum;
        bool is_token[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                is_token[n][j] = token + 8 * n + lane % 4 * 2 + j < of_row.split.context.length;
                if (is_token[n][j]) maximum = fmaxf(maximum, scores[n][j]);
            }
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
        const float factor = exp2f(before - maximum);
        total *= factor;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                scores[n][j] = is_token[n][j] ? exp2f(scores[n][j] - maximum) : 0;
                total += scores[n][j];
            }
        return factor;
    }

    // AT_ONCE heads after the other: lanes of which lane % 4 is the same have their sums of values.
    __device__ __forceinline__ void merge(const Program& program, float maximum, float total, u32 tag) const {
        const int lane = program.lane;
        float* const of_warps = (float*)(program.shared + Attention::MAXIMA_AT) + 2 * AT_ONCE * program.warp;
        float* const sums = (float*)(program.shared + VALUES_AT) + AT_ONCE * HEAD_SIZE * program.warp;
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
        constexpr int TURNS = (HEADS + AT_ONCE - 1) / AT_ONCE;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            program.sync();
            if (lane % 4 == 0 && lane / 8 == turn) {
                of_warps[lane / 4 % 2 * 2] = maximum;
                of_warps[lane / 4 % 2 * 2 + 1] = total;
            }
            if (lane % 4 == turn)
#pragma unroll
                for (int i = 0; i < OUTS; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sums[j % 2 * HEAD_SIZE + 16 * i + j / 2 * 8 + lane / 4] = out[i][j];
            const int head = of_row.split.first_head + AT_ONCE * turn;
            if (HEADS % AT_ONCE && turn == TURNS - 1) of_row.merge_warps<1, AT_ONCE>(program, head, tag);
            else of_row.merge_warps<AT_ONCE>(program, head, tag);
        }
    }
};
