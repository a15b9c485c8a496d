// A mixture of experts in the place of the MLP in persistent_layers.cu.
//
// Macros: NORMALISES (the weights of the chosen experts sum to 1), IS_GELU and SHARED_BYTES.

struct Mlp {
    static constexpr int NUM_EXPERTS = OF[ROUTER].outputs, K = OF[DOWN].parts, INTERMEDIATE = GATED / K;
    static constexpr int NUM_WORDS = GATED + NUM_EXPERTS;  // the latter are logits
    static constexpr int SHARES = 4 * NUM_EXPERTS <= THREADS ? 4 : 2 * NUM_EXPERTS <= THREADS ? 2 : 1;  // threads of an expert
    // In shared memory: a key of each expert; of the chosen ones, by rank, the index and the score; the choice's barrier.
    static constexpr int KEYS_AT = (END_AT + 15) / 16 * 16, CHOSEN_AT = KEYS_AT + 4 * NUM_EXPERTS;
    static constexpr int SCORES_AT = CHOSEN_AT + 4 * K, CHOICE_AT = SCORES_AT + 4 * K;
    static_assert(NUM_BARRIERS == 6 && CHOICE_AT + 8 <= SHARED_BYTES && CHOICE_AT % 8 == 0);
    static_assert(NUM_EXPERTS % 4 == 0 && NUM_EXPERTS <= THREADS && K <= NUM_EXPERTS && OF[ROUTER].unit_rows == 1);

    static __device__ __forceinline__ void init_barriers(const Program& program) { init_barrier(program.base + CHOICE_AT, K); }

    // The experts' are copied once they are chosen. index: of the layer.
    static __device__ __forceinline__ void copy_weights(Producer& producer, const Layer& layer, int index) {
        copy_product<ROUTER>(producer, layer);
        wait_for(producer.base + CHOICE_AT, index & 1);
        copy_gate_up(producer, layer);
        copy_down(producer, layer);
    }

    static __device__ __forceinline__ size_t chosen(u32 base, int rank) { return load_4(base + CHOSEN_AT + 4 * rank); }

    // Weights: [NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN]. A unit is of one expert.
    static __device__ __forceinline__ void copy_gate_up(Producer& producer, const Layer& layer) {
        constexpr int ROWS = OF[GATE_UP].slot_rows, UNIT = OF[GATE_UP].unit_rows, HALF = UNIT / 2;
        constexpr int UNITS = INTERMEDIATE / HALF;
        static_assert(INTERMEDIATE % HALF == 0 && HALF % ROWS == 0 && OF[GATE_UP].parts == 1);
#pragma unroll 1
        for (int unit = first_unit<GATE_UP>(); unit < OF[GATE_UP].units(); unit += NUM_PROGRAMS) {
            const size_t first = chosen(producer.base, unit / UNITS) * 2 * INTERMEDIATE + unit % UNITS * HALF;
#pragma unroll 1
            for (int i = 0; i < UNIT; i += ROWS) {
                const size_t row = first + (i < HALF ? i : INTERMEDIATE + i - HALF);
                copy_rows<GATE_UP>(producer, layer, row, row * HIDDEN);
            }
        }
    }

    // Weights: [NUM_EXPERTS, HIDDEN, INTERMEDIATE].
    static __device__ __forceinline__ void copy_down(Producer& producer, const Layer& layer) {
        constexpr int ROWS = OF[DOWN].slot_rows, UNIT = OF[DOWN].unit_rows;
#pragma unroll 1
        for (int unit = first_unit<DOWN>(); unit < OF[DOWN].units(); unit += NUM_PROGRAMS)
#pragma unroll 1
            for (int i = 0; i < UNIT; i += ROWS)
#pragma unroll 1
                for (int rank = 0; rank < K; rank++) {
                    const size_t row = chosen(producer.base, rank) * HIDDEN + unit * UNIT + i;
                    copy_rows<DOWN>(producer, layer, row, row * INTERMEDIATE);
                }
    }

    static __device__ __forceinline__ float rounded(float value) {
        return low_half(to_16_bits(value, TYPE), TYPE);
    }

    // In the order in which experts are chosen: by logits of 16 bits, which that of no number precedes, then by index. All
    // differ, so that K experts are chosen whatever the logits are.
    static __device__ __forceinline__ u32 key_of(u32 word, int expert) {
        const float logit = number_of(word) + 0.f;  // no -0
        const u32 bits = to_16_bits(logit, TYPE);
        return (bits & 0x8000 ? ~bits << 16 : (bits | 0x8000) << 16) | (0xffff - expert);
    }

    static __device__ __forceinline__ float logit_of(u32 key) {
        return low_half(key >> 31 ? key >> 16 & 0x7fff : ~key >> 16, TYPE);
    }

    // How many keys are larger: each of an expert's threads compares a share of them.
    static __device__ __forceinline__ int rank_of(const Program& program, u32 key, int share) {
        constexpr int VECTORS = NUM_EXPERTS / 4, AT_ONCE = 8;
        int rank = 0;
#pragma unroll 1
        for (int first = share; first < VECTORS; first += SHARES * AT_ONCE) {
            uint4 others[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int vector = first + i * SHARES;
                others[i] = vector < VECTORS ? load_16(program.base + KEYS_AT + 16 * vector) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                rank += (others[i].x > key) + (others[i].y > key) + (others[i].z > key) + (others[i].w > key);
        }
#pragma unroll
        for (int lanes = 1; lanes < SHARES; lanes *= 2) rank += __shfl_xor_sync(~0u, rank, lanes);
        return rank;
    }

    // Every program chooses, and all the same. The producer is told the experts at once; their scores are for later.
    static __device__ __forceinline__ void choose(const Program& program, const u32* logits, u32 tag) {
        const int expert = threadIdx.x / SHARES, share = threadIdx.x % SHARES;
        u32* const keys = (u32*)(program.shared + KEYS_AT);
        u32 key = 0;
        if (expert < NUM_EXPERTS) {
            program.load_until_written([&] { return Program::load<1, 1>(&key, logits + expert, 0, tag); });
            keys[expert] = key = key_of(key, expert);
        }
        program.has_row();
        program.sync();
        const int rank = rank_of(program, key, share);
        const bool is_chosen = expert < NUM_EXPERTS && rank < K && share == 0;
        if (is_chosen) {
            store_4(program.base + CHOSEN_AT + 4 * rank, expert);
            arrive(program.base + CHOICE_AT);
        }
        u32 largest = 0;
        for (int i = program.lane; i < NUM_EXPERTS; i += 32) largest = max(largest, keys[i]);
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
        float total = 0;
        for (int i = program.lane; i < NUM_EXPERTS; i += 32) total += __expf(logit_of(keys[i]) - logit_of(largest));
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
        if (is_chosen) ((float*)(program.shared + SCORES_AT))[rank] = __expf(logit_of(key) - logit_of(largest)) / total;
    }

    static __device__ __forceinline__ float weight_of(const Program& program, int rank) {
        const float* const scores = (const float*)(program.shared + SCORES_AT);
        if (!NORMALISES) return rounded(scores[rank]);
        float total = 0;
#pragma unroll
        for (int i = 0; i < K; i++) total += scores[i];
        return rounded(scores[rank] / total);
    }

    // Of each chosen expert its gated numbers, times its weight.
    static __device__ __forceinline__ void gate(
        Program& program, Slots& ring, const Normed& normed, u32* gated, u32 tag, float eps
    ) {
        u32* const logits = gated + GATED;
        multiply<ROUTER>(program, ring, normed.x);
        const float factor = normed.factor(program, eps);
        for (int j = threadIdx.x; j < num_units<ROUTER>(); j += THREADS)
            program.store(logits + output_of<ROUTER>(j), rounded(sum_of_row(program, j) * factor), tag);
        program.arrive_at_grid();
        program.wait_for_grid();
        choose(program, logits, tag);
        multiply_normed<GATE_UP>(program, ring, normed, [&](int row, float gate, float up) {
            const int output = output_of<GATE_UP>(row);
            const float value = activated<IS_GELU>(gate * factor) * (up * factor);
            program.store(gated + output, value * weight_of(program, output / INTERMEDIATE), tag);
        });
    }

    // Parts of a row are experts'.
    static __device__ __forceinline__ void multiply_gated(const Program& program, Slots& ring, const u32* gated, u32 tag) {
        multiply_words<DOWN>(program, ring, gated, tag);
    }
};
