// Attention of a warp of a persistent kernel to 16 tokens at a time, by tensor cores.

// Up to eight query heads of a KV head. Scores are [heads, tokens], of which a lane has four of head lane / 4, so that
// weights are the second factor of the other product as they are: values transposed [HEAD_SIZE, tokens] times weights
// [tokens, heads].
template <int HEADS> struct WarpAttention {
    static constexpr int ROW_BYTES = 2 * HEAD_SIZE;
    static constexpr int CHUNKS = HEAD_SIZE / 32;  // of eight numbers, of a lane of a key
    static constexpr int OUTS = HEAD_SIZE / 16;
    static_assert(HEADS <= 8);

    u32 query[4 * CHUNKS];              // pairs
    float out[OUTS][4];                 // of two heads
    float maximum = -1e30f, total = 0;  // of head lane / 4; the latter of the lane's tokens

    // queries_at: in shared memory, [HEADS, HEAD_SIZE] float32, scaled.
    __device__ __forceinline__ WarpAttention(const Program& program, int queries_at) {
        load_query(program, queries_at);
#pragma unroll
        for (int i = 0; i < OUTS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) out[i][j] = 0;
    }

    // In the order in which a lane has a key: chunks lane % 4, lane % 4 + 4, ...
    __device__ __forceinline__ void load_query(const Program& program, int queries_at) {
        const int head = program.lane / 4;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const u32 from = program.base + queries_at + 4 * (head * HEAD_SIZE + 8 * (program.lane % 4 + 4 * i));
            const uint4 low = load_16(from), high = load_16(from + 16);
            const u32 numbers[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                query[4 * i + j] = head < HEADS ? to_pair(__uint_as_float(numbers[2 * j]), __uint_as_float(numbers[2 * j + 1]), TYPE) : 0;
        }
    }

    // The key and value of this step, and zeros for what is behind it, to a tile from `token` on, of which the cache has
    // neither. They are in shared memory, from `own_key` on.
    static __device__ __forceinline__ void complete(const Program& program, u32 keys, u32 own_key, int token, int length) {
        for (int i = program.lane; i < 16 * (ROW_BYTES / 16); i += 32) {
            const int own = token + i / (ROW_BYTES / 16) - (length - 1);
            if (own < 0) continue;
            uint4 key = make_uint4(0, 0, 0, 0), value = key;
            if (own == 0) {
                const u32 from = own_key + i % (ROW_BYTES / 16) * 16;
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

    // To 16 tokens from `token` on, whose keys, and values SLOT_VALUES_AT behind them, are in shared memory.
    __device__ __forceinline__ void attend(const Program& program, u32 keys, int token, int length) {
        const int lane = program.lane;
        float weights[2][4] = {};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                const uint4 key = load_16(keys + (8 * n + lane / 4) * ROW_BYTES + 16 * (lane % 4 + 4 * i));
                multiply_16_bits(weights[n], query[4 * i], 0, query[4 * i + 1], 0, key.x, key.y, TYPE);
                multiply_16_bits(weights[n], query[4 * i + 2], 0, query[4 * i + 3], 0, key.z, key.w, TYPE);
            }
        const float factor = to_weights(program, token, length, weights);
        const float factors[] = {__shfl_sync(~0u, factor, lane % 4 * 8), __shfl_sync(~0u, factor, lane % 4 * 8 + 4)};
#pragma unroll
        for (int i = 0; i < OUTS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) out[i][j] *= factors[j % 2];
        add_values(program, keys + SLOT_VALUES_AT, to_pair(weights[0][0], weights[0][1], TYPE),
                   to_pair(weights[1][0], weights[1][1], TYPE));
    }

    // Scores to weights, whose maximum this changes. Returns what multiplies the sums before.
    __device__ __forceinline__ float to_weights(const Program& program, int token, int length, float (*scores)[4]) {
        const int lane = program.lane;
        const float before = maximum;
        bool is_token[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                is_token[n][j] = token + 8 * n + lane % 4 * 2 + j < length;
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

    // The lane's total to that of all its warp's tokens.
    __device__ __forceinline__ void add_totals() {
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) total += __shfl_xor_sync(~0u, total, lanes);
    }
};
