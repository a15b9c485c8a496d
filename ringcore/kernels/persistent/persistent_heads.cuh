// The heads of this step's row in persistent_layers.cu: queries of a program, and the key and value that attention adds to
// the KV cache; and how programs merge what they have of a context.
//
// Macros: HAS_HEAD_NORM, HEAD_GAIN_TYPE, and TYPE of weights, keys and values.

// What attention of all layers has in common.
struct Attention {
    static constexpr int V = HEAD_SIZE / 32;  // numbers of a lane of a head
    static constexpr int MOST_SPLITS = MAX_SPLITS > MAX_LONG_SPLITS ? MAX_SPLITS : MAX_LONG_SPLITS;
    static constexpr int KEY_AT = SCRATCH_AT, MAXIMA_AT = KEY_AT + 4 * HEAD_SIZE;  // of this step, and its value

    // Words: the result [OUT_SIZE]; q, k and v [QKV_SIZE]; and pairs of a number and a whole tag, since a place is not
    // written in every layer: of each split the result [MOST_SPLITS, OUT_SIZE], and its log-sum-exp, base 2, of a head
    // [MOST_SPLITS, NUM_HEADS].
    u32* const result;
    const Split split;
    const float scale, eps;
    const int own_page;
    float cos_sin[V];  // of the lane's numbers of a head

    __device__ __forceinline__ Attention(
        const Program& program, u32* exchanged, const Split& split, const float* angles, float scale, float eps
    ) : result(exchanged), split(split), scale(scale * 1.4426950408889634f), eps(eps),
        own_page(split.context.length ? split.context.page_of(split.context.length - 1) : 0) {
#pragma unroll
        for (int i = 0; i < V; i++) cos_sin[i] = __ldcg(angles + program.lane * V + i);
    }

    __device__ __forceinline__ u32* qkv() const { return result + OUT_SIZE; }
    __device__ __forceinline__ u64* partials() const { return (u64*)(qkv() + QKV_SIZE); }
    __device__ __forceinline__ u64* sums() const { return partials() + MOST_SPLITS * OUT_SIZE; }

    // Of q's heads, or of k's.
    static __device__ __forceinline__ void load_head_gains(const Program& program, u32* of_lane, bool is_key, const void* gains) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            const int at = is_key * HEAD_SIZE + program.lane * V + i;
            of_lane[i] = HEAD_GAIN_TYPE == 2 ? __ldcg((const u32*)gains + at) : __ldcg((const u16*)gains + at);
        }
    }

    // A head from its words: if it has gains normalised, and unless it is a value rotated.
    __device__ __forceinline__ void load_head(
        const Program& program, const u32* from, const u32* gains, bool is_value, float* x, u32 tag
    ) const {
        u32 words[V];
        program.load_until_written([&] { return Program::load<1, V>(words, from + program.lane * V, 0, tag); });
        float square = 0;
#pragma unroll
        for (int i = 0; i < V; i++) {
            x[i] = number_of(words[i]);
            square += x[i] * x[i];
        }
        if (is_value) return;
        if (HAS_HEAD_NORM) {
#pragma unroll
            for (int lanes = 16; lanes; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
            const float factor = rsqrtf(square / HEAD_SIZE + eps);
#pragma unroll
            for (int i = 0; i < V; i++)
                x[i] *= factor * (HEAD_GAIN_TYPE == 2 ? __uint_as_float(gains[i]) : low_half(gains[i], HEAD_GAIN_TYPE));
        }
#pragma unroll
        for (int i = 0; i < V; i += 2) {  // pairs are interleaved
            const float real = x[i] * cos_sin[i] - x[i + 1] * cos_sin[i + 1];
            x[i + 1] = x[i] * cos_sin[i + 1] + x[i + 1] * cos_sin[i];
            x[i] = real;
        }
    }

    // q, k and v of this step to shared memory, q in float32 and scaled; k and v to the KV cache. A head by a warp.
    template <int HEADS> __device__ __forceinline__ void load_heads(
        const Program& program, int queries_at, u16* kv_cache, const void* gains, u32 tag
    ) const {
        u32 of_lane[V];
        if (HAS_HEAD_NORM) load_head_gains(program, of_lane, program.warp >= HEADS, gains);
        program.sync();  // no warp is in the scratch any more
        u16* const own_key =
            split.writes_cache ? kv_cache + Context::place_of_key(split.kv_head, own_page, split.context.length - 1) : nullptr;
        for (int which = program.warp; which < HEADS + 2; which += NUM_WARPS) {
            const int at = which < HEADS ? (split.first_head + which) * HEAD_SIZE
                                         : OUT_SIZE + (which - HEADS) * KV_SIZE + split.kv_head * HEAD_SIZE;
            if (HAS_HEAD_NORM && which >= NUM_WARPS) load_head_gains(program, of_lane, which >= HEADS, gains);
            float x[V];
            load_head(program, qkv() + at, of_lane, which > HEADS, x, tag);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const int in_head = program.lane * V + i;
                if (which < HEADS) {
                    ((float*)(program.shared + queries_at))[which * HEAD_SIZE + in_head] = x[i] * scale;
                    continue;
                }
                const u16 rounded = to_16_bits(x[i], TYPE);
                ((u16*)(program.shared + KEY_AT))[(which - HEADS) * HEAD_SIZE + in_head] = rounded;
                if (own_key) own_key[(which - HEADS) * VALUES + in_head] = rounded;
            }
        }
        program.sync();
    }

    // HEADS of a program's split from `first_head` on: the sum of values, and its log-sum-exp, from what its warps have
    // stored: maxima and totals [NUM_WARPS, ROOM, 2], values [NUM_WARPS, ROOM, HEAD_SIZE].
    template <int HEADS, int ROOM = HEADS> __device__ __forceinline__ void merge_warps(
        const Program& program, int first_head, u32 tag
    ) const {
        const float* const of_warps = (const float*)(program.shared + MAXIMA_AT);
        const float* const values = of_warps + 2 * NUM_WARPS * ROOM;
        program.sync();
        for (int i = threadIdx.x; i < HEADS * HEAD_SIZE; i += THREADS) {
            const int g = i / HEAD_SIZE;
            float maximum = of_warps[2 * g], total = 0, value = 0;
#pragma unroll
            for (int j = 1; j < NUM_WARPS; j++) maximum = fmaxf(maximum, of_warps[2 * (j * ROOM + g)]);
#pragma unroll
            for (int j = 0; j < NUM_WARPS; j++) {
                const float factor = exp2f(of_warps[2 * (j * ROOM + g)] - maximum);
                total += of_warps[2 * (j * ROOM + g) + 1] * factor;
                value += values[j * ROOM * HEAD_SIZE + i] * factor;
            }
            value = total == 0 ? 0 : __fdividef(value, total);  // a context without tokens
            const int at = first_head * HEAD_SIZE + i;
            if (split.num_splits == 1) {
                program.store(result + at, value, tag);
                continue;
            }
            program.store_with_tag(partials() + split.index * OUT_SIZE + at, value, tag);
            if (i % HEAD_SIZE == 0) program.store_with_tag(sums() + split.index * NUM_HEADS + first_head + g, maximum + log2f(total), tag);
        }
    }

    // The result from the partials of all splits, by a warp for 32 numbers, of one head.
    __device__ __forceinline__ void combine(const Program& program, u32 tag) const {
        const int i = (program.warp * NUM_PROGRAMS + blockIdx.x) * 32 + program.lane;
        if (i >= OUT_SIZE) return;
        constexpr int AT_ONCE = MAX_SPLITS;  // of a short context all
        float maximum = -1e30f, total = 0, value = 0;
#pragma unroll 1
        for (int first = 0; first < split.num_splits; first += AT_ONCE) {
            u64 words[AT_ONCE], of_splits[AT_ONCE];
            const int count = split.num_splits - first;
            program.load_until_written([&] {
                u32 differs = 0;
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++) {
                    if (s >= count) break;
                    words[s] = load_past_l1(partials() + (first + s) * OUT_SIZE + i);
                    of_splits[s] = load_past_l1(sums() + (first + s) * NUM_HEADS + i / HEAD_SIZE);
                }
#pragma unroll
                for (int s = 0; s < AT_ONCE; s++)
                    if (s < count) differs |= Program::differs(words[s], tag) | Program::differs(of_splits[s], tag);
                return differs;
            });
            const float before = maximum;
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++)
                if (s < count) maximum = fmaxf(maximum, Program::number_with_tag(of_splits[s]));
            const float factor = exp2f(before - maximum);
            total *= factor;
            value *= factor;
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++)
                if (s < count) {
                    const float weight = exp2f(Program::number_with_tag(of_splits[s]) - maximum);
                    total += weight;
                    value = fmaf(weight, Program::number_with_tag(words[s]), value);
                }
        }
        program.store(result + i, __fdividef(value, total), tag);
    }
};
