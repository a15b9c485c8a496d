// PTX instructions and conversions as functions, for all kernels in CUDA C++ (cuda_kernel.py puts them before a source).
// Addresses of shared memory are of 32 bits. Types of numbers: 0 bfloat16, 1 float16, 2 float32.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Programmatic dependent launch: see dependent_launch.py.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// How many registers a thread may have from here on, called by the four warps of a group: from 24 to 240, by 8.
template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// Named barriers of a program's threads.
template <int COUNT> __device__ __forceinline__ void sync_threads(int barrier) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(COUNT) : "memory");
}

template <int COUNT> __device__ __forceinline__ void arrive_threads(int barrier) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "n"(COUNT) : "memory");
}

// Barriers in shared memory (mbarrier): a phase ends when all have arrived and all expected bytes have landed.
__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(u32 barrier, int count = 1) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u32 barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(num_bytes) : "memory");
}

// Returns where the phase of this parity has ended.
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @done bra DONE;"
                 " bra AGAIN; DONE: }" :: "r"(barrier), "r"(parity) : "memory");
}

// What is read once: the L2 cache evicts it first.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// TMA: a box of a tensor, from these coordinates on.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int a, int b, int c, int d, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :: "r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int a, int b, int c, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(to), "l"(&map), "r"(a), "r"(b), "r"(c), "r"(barrier) : "memory");
}

// A bulk copy of contiguous bytes, a multiple of 16, aligned to 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, int num_bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(num_bytes), "r"(barrier), "l"(policy) : "memory");
}

// What programs of a launch tell each other: relaxed, so in no order; past the L1 cache.
__device__ __forceinline__ u64 add_to_counter(u64* counter, u64 number) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(counter), "l"(number) : "memory");
    return before;
}

__device__ __forceinline__ u64 load_counter(const u64* counter) {
    u64 found;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(counter) : "memory");
    return found;
}

__device__ __forceinline__ void store_past_l1(u32* to, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_past_l1(u64* to, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ void store_16_past_l1(u32* to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// What this thread has stored is there for all programs before what it stores later.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ u64 load_past_l1(const u64* from) { return load_counter(from); }

template <int WIDTH> __device__ __forceinline__ void load_past_l1(u32* words, const u32* from) {
    if constexpr (WIDTH > 4) {
        load_past_l1<WIDTH / 2>(words, from);
        load_past_l1<WIDTH / 2>(words + WIDTH / 2, from + WIDTH / 2);
    } else if (WIDTH == 4)
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(from) : "memory");
    else if (WIDTH == 2)
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from) : "memory");
    else
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(from) : "memory");
}

__device__ __forceinline__ uint4 load_16(u32 address) {
    uint4 found;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(address) : "memory");
    return found;
}

__device__ __forceinline__ uint2 load_8(u32 address) {
    uint2 found;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(found.x), "=r"(found.y) : "r"(address) : "memory");
    return found;
}

__device__ __forceinline__ u32 load_4(u32 address) {
    u32 found;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(address) : "memory");
    return found;
}

__device__ __forceinline__ void store_4(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// What was stored to shared memory is there before what is copied to it later.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four matrices of eight rows of eight numbers of 16 bits, transposed. `row`: of the lane, row lane % 8 of matrix lane / 8. A
// lane gets of each matrix column lane / 4 of rows lane % 4 * 2 and the next one.
__device__ __forceinline__ void load_transposed(u32* pairs, u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(row) : "memory");
}

// sums += first matrix [16, 16] times second matrix [16, 8], of bfloat16 or float16.
__device__ __forceinline__ void multiply_16_bits(
    float* sums, u32 a, u32 b, u32 c, u32 d, u32 first, u32 second, int type
) {
    if (type == 0)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a), "r"(b), "r"(c), "r"(d), "r"(first), "r"(second));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a), "r"(b), "r"(c), "r"(d), "r"(first), "r"(second));
}

// sums += first matrix [16, 32], unsigned bytes, times second matrix [32, 8], signed bytes.
__device__ __forceinline__ void multiply_bytes(int* sums, u32 a, u32 b, u32 c, u32 d, u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(first), "r"(second));
}

// The first number of a pair of float16s, and the second.
__device__ __forceinline__ float low_float16(u32 pair) {
    float found;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(found) : "r"(pair));
    return found;
}

__device__ __forceinline__ float high_float16(u32 pair) {
    float found;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(found) : "r"(pair));
    return found;
}

// Pairs of float16s.
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 found;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
}

__device__ __forceinline__ u32 add_products(u32 a, u32 b, u32 sums) {
    u32 found;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(sums));
    return found;
}

// Codes of float8_e4m3fn as pairs of float16s: the first two of four, and the others.
__device__ __forceinline__ uint2 numbers_of_e4m3(u32 codes) {
    uint2 found;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(found.x), "=r"(found.y) : "r"(codes));
    return found;
}

// The nearest numbers of e4m3 times E4M3_UNIT, as a pair of float16s: eight products of these and other such numbers, which
// are at most 448, are less than the largest float16.
constexpr float E4M3_UNIT = 0.03125f;

__device__ __forceinline__ u32 rounded_to_e4m3(float first, float second) {
    u32 found;
    asm("{ .reg .b16 codes; .reg .b32 unit; mov.b32 unit, 0x28002800; cvt.rn.satfinite.e4m3x2.f32 codes, %2, %1;"
        " cvt.rn.f16x2.e4m3x2 %0, codes; mul.rn.f16x2 %0, %0, unit; }" : "=r"(found) : "f"(first), "f"(second));
    return found;
}

__device__ __forceinline__ u16 to_bfloat16(float value) {
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
}

__device__ __forceinline__ u16 to_float16(float value) {
    u16 rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return rounded;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float found;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
    return found;
}
