// The MLP of a dense decoder in persistent_layers.cu.
//
// Macros: IS_GELU and SHARED_BYTES.

struct Mlp {
    static constexpr int NUM_WORDS = GATED;
    static_assert(NUM_BARRIERS == 6 && END_AT == SHARED_BYTES);

    static __device__ __forceinline__ void init_barriers(const Program&) {}

    static __device__ __forceinline__ void copy_weights(Producer& producer, const Layers& layers, int index, int num_layers) {
        producer.copy_weights<GATE_UP>(layers.at[index].weights[GATE_UP]);
        producer.copy_weights<DOWN>(layers.at[index].weights[DOWN]);
    }

    static __device__ __forceinline__ void gate(
        Program& program, Slots& ring, const Normed& normed, u32* gated, u32 tag, float eps
    ) {
        const int count = multiply<GATE_UP>(program, ring, normed.x);
        const float factor = normed.factor(program, eps);
        constexpr int UNIT = OF[GATE_UP].unit_rows, HALF = UNIT / 2;
        for (int j = threadIdx.x; j < count * HALF; j += THREADS) {
            const int row = j / HALF * UNIT + j % HALF;
            program.store(gated + output_of<GATE_UP>(j),
                       activated<IS_GELU>(sum_of_row(program, row) * factor) * (sum_of_row(program, row + HALF) * factor), tag);
        }
    }

    static __device__ __forceinline__ void multiply_gated(const Program& program, Slots& ring, const u32* gated, u32 tag) {
        multiply_words<DOWN>(program, ring, gated, tag);
    }
};
