// Attention of a step's rows in persistent_rows.cu.
//
// Macros: HAS_HEAD_NORM, HEAD_GAIN_TYPE, and TYPE of weights, keys and values.

// A warp has 16 tokens of a slot of the ring, and sums of its own, which are merged at the end of a part.
struct RowsAttention {
    using Warp = WarpAttention<GROUP>;
    static constexpr int V = HEAD_SIZE / 32;  // numbers of a lane of a head
    static constexpr int WARPS_OF_SLOT = SLOT_TOKENS / 16, SLOTS_AT_ONCE = NUM_WARPS / WARPS_OF_SLOT;
    static constexpr int AT_ONCE = MERGED_HEADS, PITCH = HEAD_PITCH;
    static constexpr int KEY_AT = SCRATCH_AT, MAXIMA_AT = KEY_AT + 4 * HEAD_SIZE;  // of this step, and its value
    static constexpr int VALUES_AT = MAXIMA_AT + 8 * NUM_WARPS * AT_ONCE, QUERIES_AT = VALUES_AT;
    static_assert(VALUES_AT % 16 == 0 && VALUES_AT + 4 * NUM_WARPS * AT_ONCE * PITCH == SCRATCH_AT + ATTENTION_BYTES);

    const Plan& plan;
    const int* const block_table;
    const int stride;
    const float scale, eps;

    __device__ __forceinline__ RowsAttention(const Plan& plan, const int* block_table, int stride, float scale, float eps)
        : plan(plan), block_table(block_table), stride(stride), scale(scale * 1.4426950408889634f), eps(eps) {}

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
        const Program& program, const u32* from, int row, const u32* gains, bool is_value, float* x
    ) const {
        u32 words[V];
        Exchange::load_until_written(program, [&] {
            load_past_l1<V>(words, from + program.lane * V);
            u32 largest = words[0];
#pragma unroll
            for (int i = 1; i < V; i++) largest = max(largest, words[i]);
            return largest;
        });
        __syncwarp();
        float square = 0;
#pragma unroll
        for (int i = 0; i < V; i++) {
            x[i] = __uint_as_float(words[i]);
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
        const float* const angles = (const float*)(program.shared + ANGLES_SCRATCH_AT) + row * HEAD_SIZE + program.lane * V;
#pragma unroll
        for (int i = 0; i < V; i += 2) {  // pairs are interleaved
            const float real = x[i] * angles[i] - x[i + 1] * angles[i + 1];
            x[i + 1] = x[i] * angles[i + 1] + x[i + 1] * angles[i];
            x[i] = real;
        }
    }

    // q of a part to shared memory, in float32 and scaled; of one that has the context's end k and v too, and to the KV cache.
    // A head by a warp.
    __device__ __forceinline__ void load_heads(
        const Program& program, const Part& part, const u32* qkv, u16* kv_cache, const void* gains
    ) const {
        const bool writes_cache = part.has_end() && part.group % GROUPS_OF_KV == 0 && part.length;
        u16* own_key = nullptr;
        if (writes_cache) {
            const int page = block_table[part.row * stride + (part.length - 1) / BLOCK_SIZE];
            own_key = kv_cache + Context::place_of_key(part.kv_head(), page, part.length - 1);
        }
        program.sync();  // no warp is in the scratch any more
        for (int which = program.warp; which < GROUP + 2 * part.has_end(); which += NUM_WARPS) {
            const int at = which < GROUP ? (part.group * GROUP + which) * HEAD_SIZE
                                         : OUT_SIZE + (which - GROUP) * KV_SIZE + part.kv_head() * HEAD_SIZE;
            u32 of_lane[V];
            if (HAS_HEAD_NORM) load_head_gains(program, of_lane, which >= GROUP, gains);
            float x[V];
            load_head(program, qkv + part.row * QKV_SIZE + at, part.row, of_lane, which > GROUP, x);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const int in_head = program.lane * V + i;
                if (which < GROUP) {
                    ((float*)(program.shared + QUERIES_AT))[which * HEAD_SIZE + in_head] = x[i] * scale;
                    continue;
                }
                const u16 rounded = to_16_bits(x[i], TYPE);
                ((u16*)(program.shared + KEY_AT))[(which - GROUP) * HEAD_SIZE + in_head] = rounded;
                if (own_key) own_key[(which - GROUP) * VALUES + in_head] = rounded;
            }
        }
        program.sync();
    }

    // A program's parts, and the merge of the first one's context if it began in another's.
    __device__ __forceinline__ void attend(
        const Program& program, Slots& ring, u32* words, u16* kv_cache, const void* gains
    ) const {
        Part part = plan.first_part;
#pragma unroll 1
        for (int at = plan.after_first; plan.first < plan.end; part = plan.next(at)) {
            load_heads(program, part, words + QKV_AT, kv_cache, gains);
            Warp of_warp(program, QUERIES_AT);
            const int in_slot = program.warp % WARPS_OF_SLOT * 16;
            Slots own = ring;
            own.advance(program.warp / WARPS_OF_SLOT);
#pragma unroll 1
            for (int slot = part.first + program.warp / WARPS_OF_SLOT; slot < part.end; slot += SLOTS_AT_ONCE) {
                wait_for(own.full(program), own.parity);
                const u32 keys = own.bytes(program) + in_slot * Warp::ROW_BYTES;
                const int token = slot * SLOT_TOKENS + in_slot;
                if (token < part.length) {
                    if (token + 16 >= part.length) Warp::complete(program, keys, program.base + KEY_AT, token, part.length);
                    of_warp.attend(program, keys, token, part.length);
                }
                __syncwarp();
                if (program.lane == 0) arrive(own.empty(program), SLOTS_AT_ONCE);
                own.advance(SLOTS_AT_ONCE);
            }
#pragma unroll 1
            for (int left = part.end - part.first; left > 0; left -= NUM_SLOTS) ring.advance(min(left, NUM_SLOTS));
            merge_warps(program, part, of_warp, words);
            if (at == plan.end) break;
        }
        if (plan.others < (int)blockIdx.x) merge_parts(program, plan.first_part, words);
    }

    // Where a program's part of a context, which is not all of it, has its words: that of the context's begin behind others.
    static __device__ __forceinline__ int place_of(int program, bool is_first) { return (2 * program + is_first) * GROUP; }

    // AT_ONCE heads after the other: lanes of which lane % 4 is the same have their sums of values.
    __device__ __forceinline__ void merge_warps(const Program& program, const Part& part, Warp& of, u32* words) const {
        const int lane = program.lane;
        const float* const all_maxima = (const float*)(program.shared + MAXIMA_AT);
        const float* const all_sums = (const float*)(program.shared + VALUES_AT);
        float* const of_warps = (float*)(program.shared + MAXIMA_AT) + 2 * AT_ONCE * program.warp;
        float* const sums = (float*)(program.shared + VALUES_AT) + AT_ONCE * PITCH * program.warp;
        of.add_totals();
        constexpr int TURNS = (GROUP + AT_ONCE - 1) / AT_ONCE, HALF = HEAD_SIZE / 2;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn++) {
            program.sync();
            if (lane % 4 == 0 && lane / 4 / AT_ONCE == turn) {
                of_warps[lane / 4 % AT_ONCE * 2] = of.maximum;
                of_warps[lane / 4 % AT_ONCE * 2 + 1] = of.total;
            }
            if (lane % 4 * 2 / AT_ONCE == turn)
#pragma unroll
                for (int i = 0; i < Warp::OUTS; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        sums[(lane % 4 * 2 + j % 2) % AT_ONCE * PITCH + 16 * i + j / 2 * 8 + lane / 4] = of.out[i][j];
            program.sync();
            for (int i = threadIdx.x; i < AT_ONCE * HALF; i += THREADS) {
                const int g = i / HALF, head = AT_ONCE * turn + g, in_head = i % HALF * 2;
                if (head >= GROUP) break;
                float maximum = all_maxima[2 * g], total = 0, first = 0, second = 0;
#pragma unroll
                for (int j = 1; j < NUM_WARPS; j++) maximum = fmaxf(maximum, all_maxima[2 * (j * AT_ONCE + g)]);
#pragma unroll
                for (int j = 0; j < NUM_WARPS; j++) {
                    const float factor = exp2f(all_maxima[2 * (j * AT_ONCE + g)] - maximum);
                    const float2 found = *(const float2*)(all_sums + (j * AT_ONCE + g) * PITCH + in_head);
                    total += all_maxima[2 * (j * AT_ONCE + g) + 1] * factor;
                    first += found.x * factor;
                    second += found.y * factor;
                }
                const float inverse = total == 0 ? 0 : __fdividef(1.f, total);  // 0: a context without tokens
                if (part.is_whole()) {
                    store_result(program, words, part, head, in_head, first * inverse, second * inverse);
                    continue;
                }
                const int place = place_of(blockIdx.x, part.first == 0) + head;
                Exchange::store(program, words + PARTIALS_AT + place * HEAD_SIZE + in_head, first * inverse);
                Exchange::store(program, words + PARTIALS_AT + place * HEAD_SIZE + in_head + 1, second * inverse);
                if (in_head == 0) Exchange::store(program, words + SUMS_AT + place, maximum + log2f(total));
            }
        }
    }

    static __device__ __forceinline__ void store_result(
        const Program& program, u32* words, const Part& part, int head, int in_head, float first, float second
    ) {
        const int output = (part.group * GROUP + head) * HEAD_SIZE + in_head;
        Exchange::store_pair(program, words + ATTENDED_AT + place_of_pair(output, part.row), first, second);
    }

    // A context's parts, of which this program has the last, and those before it the others.
    __device__ __forceinline__ void merge_parts(const Program& program, const Part& part, u32* words) const {
        const int begin = plan.others;
        constexpr int HALF = HEAD_SIZE / 2, PARTS = 4;  // the latter: that are loaded at once
#pragma unroll 1
        for (int i = threadIdx.x; i < GROUP * HALF; i += THREADS) {
            const int head = i / HALF, in_head = i % HALF * 2;
            float maximum = -1e30f, total = 0, first = 0, second = 0;
#pragma unroll 1
            for (int from = begin; from <= (int)blockIdx.x; from += PARTS) {
                u32 sums[PARTS], values[PARTS][2];
                // The sums first, of which a warp has one: lanes that load again and again would delay the parts.
                Exchange::load_until_written(program, [&] {
                    u32 largest = 0;
#pragma unroll
                    for (int j = 0; j < PARTS; j++) {
                        const int at = place_of(min(from + j, (int)blockIdx.x), from + j == begin) + head;
                        load_past_l1<1>(sums + j, words + SUMS_AT + at);
                        largest = max(largest, sums[j]);
                    }
                    return largest;
                });
                Exchange::load_until_written(program, [&] {
                    u32 largest = 0;
#pragma unroll
                    for (int j = 0; j < PARTS; j++) {
                        const int at = place_of(min(from + j, (int)blockIdx.x), from + j == begin) + head;
                        load_past_l1<2>(values[j], words + PARTIALS_AT + at * HEAD_SIZE + in_head);
                        largest = max(largest, max(values[j][0], values[j][1]));
                    }
                    return largest;
                });
#pragma unroll
                for (int j = 0; j < PARTS; j++) {
                    if (from + j > (int)blockIdx.x) break;
                    const float sum = __uint_as_float(sums[j]), before = maximum;
                    maximum = fmaxf(maximum, sum);
                    const float factor = exp2f(before - maximum), weight = exp2f(sum - maximum);
                    total = total * factor + weight;
                    first = first * factor + weight * __uint_as_float(values[j][0]);
                    second = second * factor + weight * __uint_as_float(values[j][1]);
                }
            }
            const float inverse = __fdividef(1.f, total);
            store_result(program, words, part, head, in_head, first * inverse, second * inverse);
        }
    }
};
