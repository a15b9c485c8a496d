// Attention in persistent_layers.cu.
//
// Macros: HAS_HEAD_NORM, HEAD_GAIN_TYPE, and TYPE of weights, keys and values.

// Attention of one row. Of a tile of the program's split a warp has WARP_TOKENS. A key or value is spread over LANES lanes.
struct Attention {
    static constexpr int TILE = Split::TILE, WARP_TOKENS = Split::WARP_TOKENS;
    static constexpr int LANES = HEAD_SIZE / 8, TOKENS = 32 / LANES, LOADS = WARP_TOKENS / TOKENS;
    static constexpr int QUERY_AT = SCRATCH_AT, KEY_AT = QUERY_AT + 4 * GROUP * HEAD_SIZE, WEIGHTS_AT = KEY_AT + 4 * HEAD_SIZE;
    static constexpr int MAXIMA_AT = WEIGHTS_AT + 4 * TILE * GROUP, VALUES_AT = MAXIMA_AT + 8 * NUM_WARPS * GROUP;
    static_assert(VALUES_AT + 4 * NUM_WARPS * GROUP * HEAD_SIZE <= SCRATCH_AT + SCRATCH_BYTES && VALUES_AT % 16 == 0);
    static constexpr int V = HEAD_SIZE / 32;         // numbers of a lane of a head
    static constexpr int HEADS = GROUP < 4 ? GROUP : 4;  // whose scores are computed at once

    // Words: the result [OUT_SIZE]; q, k and v [QKV_SIZE]; of each split the result [MAX_SPLITS, OUT_SIZE], and its
    // log-sum-exp, base 2, of a head [MAX_SPLITS, NUM_HEADS].
    u32* const result;
    const float scale, eps;
    const Split split;
    const size_t own_place;            // of this step's key
    uint4 keys[LOADS], values[LOADS];  // of a tile
    float cos_sin[V];                  // of the lane's numbers of a head
    u32 head_gains[V];                 // likewise, of its warp's head: 16 or 32 bits

    __device__ __forceinline__ Attention(
        const Program& program, u32* exchanged, const Split& split, const float* angles, float scale, float eps
    ) : result(exchanged), scale(scale * 1.4426950408889634f), eps(eps), split(split),
        own_place(split.length ? split.place_of_key(split.page_of(split.length - 1), split.length - 1) : 0) {
#pragma unroll
        for (int i = 0; i < V; i++) cos_sin[i] = __ldcg(angles + program.lane * V + i);
    }

    __device__ __forceinline__ u32* qkv() const { return result + OUT_SIZE; }
    __device__ __forceinline__ u32* partials() const { return qkv() + QKV_SIZE; }
    __device__ __forceinline__ u32* sums() const { return partials() + MAX_SPLITS * OUT_SIZE; }

    // Of the lane's i-th key or value of a tile.
    __device__ __forceinline__ int token_of(const Program& program, int tile, int i) const {
        return tile * TILE + program.warp * WARP_TOKENS + i * TOKENS + program.lane / LANES;
    }

    __device__ __forceinline__ void load_tile(const Program& program, const Slots& ring, int tile) {
        const int in_tile = token_of(program, 0, 0), slot = program.warp * WARP_TOKENS / Split::SLOT_TOKENS;
        const u32 from = ring.bytes(program, slot) + 2 * (in_tile % Split::SLOT_TOKENS) * HEAD_SIZE + program.lane % LANES * 16;
        const u32 own = program.base + KEY_AT + program.lane % LANES * 16;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int token = token_of(program, tile, i);
            keys[i] = values[i] = make_uint4(0, 0, 0, 0);
            if (token >= split.length) continue;
            const bool is_own = token == split.length - 1;
            const u32 at = is_own ? own : from + 2 * i * TOKENS * HEAD_SIZE;
            keys[i] = load_16(at);
            values[i] = load_16(at + (is_own ? 2 * HEAD_SIZE : Split::VALUES_AT));
        }
    }

    __device__ __forceinline__ void load_head_gains(const Program& program, int which, const void* gains) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            const int at = (which >= GROUP) * HEAD_SIZE + program.lane * V + i;
            head_gains[i] = HEAD_GAIN_TYPE == 2 ? __ldcg((const u32*)gains + at) : __ldcg((const u16*)gains + at);
        }
    }

    // A head of q, k or v by a warp, normalised and rotated: HEAD_SIZE / 32 numbers of a lane.
    __device__ __forceinline__ void load_head(const Program& program, int which, const void* gains, float* x, u32 tag) {
        const int at = which < GROUP ? (split.group * GROUP + which) * HEAD_SIZE
                                     : OUT_SIZE + (which - GROUP) * KV_SIZE + split.kv_head() * HEAD_SIZE;
        u32 words[V];
        program.load_until_written([&] { return Program::load<1, V>(words, qkv() + at + program.lane * V, 0, tag); });
        float square = 0;
#pragma unroll
        for (int i = 0; i < V; i++) {
            x[i] = number_of(words[i]);
            square += x[i] * x[i];
        }
        if (which > GROUP) return;
        if (HAS_HEAD_NORM) {
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
            const float factor = rsqrtf(square / HEAD_SIZE + eps);
            if (which >= NUM_WARPS) load_head_gains(program, which, gains);
#pragma unroll
            for (int i = 0; i < V; i++)
                x[i] *= factor * (HEAD_GAIN_TYPE == 2 ? __uint_as_float(head_gains[i]) : low_half(head_gains[i], HEAD_GAIN_TYPE));
        }
#pragma unroll
        for (int i = 0; i < V; i += 2) {  // pairs are interleaved
            const float real = x[i] * cos_sin[i] - x[i + 1] * cos_sin[i + 1];
            x[i + 1] = x[i] * cos_sin[i + 1] + x[i + 1] * cos_sin[i];
            x[i] = real;
        }
    }

    // One program of those that have the last token.
    __device__ __forceinline__ bool writes_cache() const {
        return split.end == split.num_tiles && split.group % GROUPS_OF_KV == 0 && split.length;
    }

    // q, k and v of this step to shared memory, q in float32; k and v to the KV cache.
    __device__ __forceinline__ void load_heads(const Program& program, u16* kv_cache, const void* gains, u32 tag) {
        u16* const own_key = writes_cache() ? kv_cache + own_place : nullptr;
        for (int which = program.warp; which < GROUP + 2; which += NUM_WARPS) {
            float x[V];
            load_head(program, which, gains, x, tag);
#pragma unroll
            for (int i = 0; i < V; i++) {
                if (which < GROUP) {
                    ((float*)(program.shared + QUERY_AT))[which * HEAD_SIZE + program.lane * V + i] = x[i] * scale;
                    continue;
                }
                const int at = program.lane * V + i;
                const u16 rounded = TYPE == 0 ? to_bfloat16(x[i]) : to_float16(x[i]);
                ((u16*)(program.shared + KEY_AT))[(which - GROUP) * HEAD_SIZE + at] = rounded;
                if (own_key) own_key[(which - GROUP) * Split::VALUES + at] = rounded;
            }
        }
        program.sync();
    }

    static __device__ __forceinline__ void expand(const uint4& pairs, float* numbers) {
#pragma unroll
        for (int d = 0; d < 4; d++) {
            numbers[2 * d] = low_half((&pairs.x)[d], TYPE);
            numbers[2 * d + 1] = high_half((&pairs.x)[d], TYPE);
        }
    }

    // Of a tile's keys and HEADS query heads the lane's share of the scores: of eight numbers from `from` on.
    __device__ __forceinline__ void score(const Program& program, int from_head, int from, float (*scores)[LOADS]) const {
        float query[HEADS][8];
#pragma unroll
        for (int j = 0; j < HEADS; j++)
#pragma unroll
            for (int d = 0; d < 8; d += 4) {
                const int head = min(from_head + j, GROUP - 1);
                const uint4 found = load_16(program.base + QUERY_AT + 4 * (head * HEAD_SIZE + from + d));
#pragma unroll
                for (int k = 0; k < 4; k++) query[j][d + k] = __uint_as_float((&found.x)[k]);
            }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            float key[8];
            expand(keys[i], key);
#pragma unroll
            for (int j = 0; j < HEADS; j++) {
                scores[j][i] = 0;
#pragma unroll
                for (int d = 0; d < 8; d++) scores[j][i] = fmaf(key[d], query[j][d], scores[j][i]);
            }
        }
    }

    // Places that this context leaves unused are written in every layer too: a tag says one time only if none is left out.
    __device__ __forceinline__ void write_unused(const Program& program, u32 tag) const {
        if (split.index >= MAX_SPLITS) return;
        for (int i = threadIdx.x; i < GROUP * HEAD_SIZE; i += THREADS)
            program.store(partials() + split.index * OUT_SIZE + split.group * GROUP * HEAD_SIZE + i, 0, tag);
        if (threadIdx.x < GROUP) program.store(sums() + split.index * NUM_HEADS + split.group * GROUP + threadIdx.x, 0, tag);
    }

    __device__ __forceinline__ void attend(const Program& program, Slots& ring, u16* kv_cache, const void* gains, u32 tag) {
        if (!split.is_live) return write_unused(program, tag);
        if (HAS_HEAD_NORM) load_head_gains(program, program.warp, gains);
        program.sync();  // no warp is in the scratch any more
        load_heads(program, kv_cache, gains, tag);
        const int lane = program.lane, from = lane % LANES * 8;
        float maxima[GROUP], totals[GROUP], weighted[GROUP][8];
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            maxima[g] = -1e30f;
            totals[g] = 0;
#pragma unroll
            for (int d = 0; d < 8; d++) weighted[g][d] = 0;
        }
        float* const weights = (float*)(program.shared + WEIGHTS_AT) + program.warp * WARP_TOKENS * GROUP;
        // After the reduction a lane has the scores of one token, which is its key of this index.
        constexpr int SAME = LANES / LOADS;
        const int own = lane % LANES / SAME;
#pragma unroll 1
        for (int tile = split.first; tile < split.end; tile++) {
            wait_for_slots<Split::TILE_SLOTS>(program, ring);
            load_tile(program, ring, tile);
            leave_slots<Split::TILE_SLOTS>(program, ring);
            const bool is_token = token_of(program, tile, own) < split.length;
#pragma unroll
            for (int from_head = 0; from_head < GROUP; from_head += HEADS) {
                float scores[HEADS][LOADS];
                score(program, from_head, from, scores);
#pragma unroll
                for (int j = 0; j < HEADS; j++) {
                    const int g = from_head + j;
                    if (g >= GROUP) break;
                    const float sum = sum_over_lanes<LOADS, LANES>(scores[j], lane), score = is_token ? sum : -1e30f;
                    float maximum = fmaxf(maxima[g], score);
#pragma unroll
                    for (int lanes = SAME; lanes < 32; lanes *= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
                    const float factor = exp2f(maxima[g] - maximum), weight = is_token ? exp2f(score - maximum) : 0;
                    maxima[g] = maximum;
                    totals[g] = totals[g] * factor + weight;
#pragma unroll
                    for (int d = 0; d < 8; d++) weighted[g][d] *= factor;
                    if (lane % SAME == 0) weights[(own * TOKENS + lane / LANES) * GROUP + g] = weight;
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                float value[8];
                expand(values[i], value);
#pragma unroll
                for (int g = 0; g < GROUP; g++) {
                    const float weight = weights[(i * TOKENS + lane / LANES) * GROUP + g];
#pragma unroll
                    for (int d = 0; d < 8; d++) weighted[g][d] = fmaf(value[d], weight, weighted[g][d]);
                }
            }
            __syncwarp();
        }
        merge_warps(program, maxima, totals, weighted, tag);
    }

    // The program's split of its heads: the sum of values, and its log-sum-exp.
    __device__ __forceinline__ void merge_warps(
        const Program& program, const float* maxima, float* totals, float (*weighted)[8], u32 tag
    ) const {
        const int lane = program.lane, from = lane % LANES * 8;
        float* const of_warps = (float*)(program.shared + MAXIMA_AT);  // [NUM_WARPS, GROUP, 2]: maximum, total
        float* const values = (float*)(program.shared + VALUES_AT);    // [NUM_WARPS, GROUP, HEAD_SIZE]
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
#pragma unroll
            for (int lanes = LANES / LOADS; lanes < 32; lanes *= 2) totals[g] += __shfl_xor_sync(~0u, totals[g], lanes);
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2)
#pragma unroll
                for (int d = 0; d < 8; d++) weighted[g][d] += __shfl_xor_sync(~0u, weighted[g][d], lanes);
            if (lane == 0) {
                of_warps[2 * (program.warp * GROUP + g)] = maxima[g];
                of_warps[2 * (program.warp * GROUP + g) + 1] = totals[g];
            }
            if (lane < LANES)
#pragma unroll
                for (int d = 0; d < 8; d++) values[(program.warp * GROUP + g) * HEAD_SIZE + from + d] = weighted[g][d];
        }
        program.sync();
        for (int i = threadIdx.x; i < GROUP * HEAD_SIZE; i += THREADS) {
            const int g = i / HEAD_SIZE;
            float maximum = of_warps[2 * g], total = 0, value = 0;
#pragma unroll
            for (int j = 1; j < NUM_WARPS; j++) maximum = fmaxf(maximum, of_warps[2 * (j * GROUP + g)]);
#pragma unroll
            for (int j = 0; j < NUM_WARPS; j++) {
                const float factor = exp2f(of_warps[2 * (j * GROUP + g)] - maximum);
                total += of_warps[2 * (j * GROUP + g) + 1] * factor;
                value += values[j * GROUP * HEAD_SIZE + i] * factor;
            }
            value = total == 0 ? 0 : __fdividef(value, total);  // a context without tokens
            if (split.num_splits == 1) program.store(result + split.group * GROUP * HEAD_SIZE + i, value, tag);
            program.store(partials() + split.index * OUT_SIZE + split.group * GROUP * HEAD_SIZE + i, value, tag);
            if (i % HEAD_SIZE) continue;
            const float sum = total == 0 ? maximum : maximum + log2f(total);
            program.store(sums() + split.index * NUM_HEADS + split.group * GROUP + g, sum, tag);
        }
    }

    // The result from the partials of all splits, by a warp for 32 numbers.
    __device__ __forceinline__ void combine(const Program& program, u32 tag) const {
        const int i = (program.warp * NUM_PROGRAMS + blockIdx.x) * 32 + program.lane;
        if (i >= OUT_SIZE) return;
        u32 words[MAX_SPLITS], of_splits[MAX_SPLITS];
        program.load_until_written([&] {
            u32 differs = 0;
#pragma unroll
            for (int s = 0; s < MAX_SPLITS; s++) {
                if (s >= split.num_splits) break;
                load_past_l1<1>(words + s, partials() + s * OUT_SIZE + i);
                load_past_l1<1>(of_splits + s, sums() + s * NUM_HEADS + i / HEAD_SIZE);
            }
#pragma unroll
            for (int s = 0; s < MAX_SPLITS; s++)
                if (s < split.num_splits) differs |= (words[s] ^ tag) | (of_splits[s] ^ tag);
            return differs;
        });
        float maximum = -1e30f, total = 0, value = 0;
#pragma unroll
        for (int s = 0; s < MAX_SPLITS; s++)
            if (s < split.num_splits) maximum = fmaxf(maximum, number_of(of_splits[s]));
#pragma unroll
        for (int s = 0; s < MAX_SPLITS; s++)
            if (s < split.num_splits) {
                const float weight = exp2f(number_of(of_splits[s]) - maximum);
                total += weight;
                value = fmaf(weight, number_of(words[s]), value);
            }
        program.store(result + i, __fdividef(value, total), tag);
    }
};
