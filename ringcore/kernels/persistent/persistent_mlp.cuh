// The MLP of a dense decoder in persistent_layers.cu.
//
// Macros: IS_GELU and SHARED_BYTES.

struct Mlp {
    static constexpr int NUM_WORDS = GATED;
    static_assert(NUM_BARRIERS == 5 && END_AT == SHARED_BYTES);

    static __device__ __forceinline__ void init_barriers(const Program&) {}

    static __device__ __forceinline__ void copy_weights(Producer& producer, const Layer& layer, int) {
        copy_product<GATE_UP>(producer, layer);
        copy_product<DOWN>(producer, layer);
    }

    static __device__ __forceinline__ void gate(
        Program& program, Slots& ring, const Normed& normed, u32* gated, u32 tag, float eps
    ) {
        multiply_normed<GATE_UP>(program, ring, normed, [&](int row, float gate, float up) {
            const float factor = normed.factor(program, eps);
            program.store(gated + output_of<GATE_UP>(row), activated<IS_GELU>(gate * factor) * (up * factor), tag);
        });
    }

    static __device__ __forceinline__ void multiply_gated(const Program& program, Slots& ring, const u32* gated, u32 tag) {
        multiply_words<DOWN>(program, ring, gated, tag);
    }
};
