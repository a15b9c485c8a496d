// Numbers in kernels in CUDA C++. Types: 0 bfloat16, 1 float16, 2 float32.

constexpr u32 NOT_A_NUMBER = 0x7fc00000u;

__device__ __forceinline__ float low_half(u32 pair, int type) {
    return type == 0 ? __uint_as_float(pair << 16) : low_float16(pair);
}

__device__ __forceinline__ float high_half(u32 pair, int type) {
    return type == 0 ? __uint_as_float(pair & 0xffff0000u) : high_float16(pair);
}

__device__ __forceinline__ u16 to_16_bits(float value, int type) { return type == 0 ? to_bfloat16(value) : to_float16(value); }

__device__ __forceinline__ u32 to_pair(float low, float high, int type) {
    return to_16_bits(low, type) | (u32)to_16_bits(high, type) << 16;
}

// SiLU, or GELU by tanh.
template <bool IS_BY_TANH> __device__ __forceinline__ float activated(float gate) {
    if (!IS_BY_TANH) return __fdividef(gate, 1.f + __expf(-gate));
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return gate - __fdividef(gate, 1.f + __expf(2.f * inner));  // gate * (1 + tanh(inner)) / 2
}
