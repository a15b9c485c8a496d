// CUDA C++ on a CPU: all threads of all programs are fibers of one thread, which change where they wait. In place of
// ptx.cuh. Which fiber is next, and when a copy by TMA or a store to the L2 cache lands, is random, by a seed.

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <ucontext.h>
#include <vector>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
using std::max;
using std::min;

#define CLOCK 0ll  // cycles from one reading of the clock to the next; a kernel's macros may define it anew
#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __align__(bytes)
#define __launch_bounds__(threads, programs)

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Position { u32 x; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

alignas(1024) char shared[228 << 10];  // of the program that runs

struct Tensor {  // in a TensorMap
    char* base;
    u64 shape[4], strides[4];  // strides in bytes
    u32 box[4], axes, number_bytes, is_swizzled;
};

struct alignas(64) TensorMap { char bytes[128]; };

struct Pointer {
    void* address;

    template <class T> operator T*() const { return (T*)address; }
};

struct Barrier { int expected, pending; long bytes; u32 phase; };
struct Meeting { int arrived; u32 round; };
struct Copy { Tensor tensor; int at[4]; u32 to, barrier; const void* bytes; u32 num_bytes; };
struct Store { void* to; u64 word; u32 num_bytes, program, thread; };

struct Fiber {
    ucontext_t start;
    jmp_buf at;  // where it waits; a switch of contexts would be a system call
    bool has_started, has_ended;
    const u32* watched;  // it waits while these bits of this word are so; without one, for its next turn
    u32 bits, so;

    bool waits() const { return watched && (*watched & bits) == so; }
};

struct Running {  // a program
    std::vector<char> shared;
    std::map<u32, Barrier> barriers;
    std::map<int, Meeting> meetings;  // named barriers
    std::vector<Copy> copies;
    std::vector<Meeting> warps;
    std::vector<Fiber> fibers;
    u64 of_lanes[1024][6];  // what the lanes of a warp give each other
};

static std::mt19937 randomness;
static jmp_buf scheduler;
static std::vector<Running> programs;
static std::unique_ptr<char[]> stacks;  // kept from launch to launch; what no thread has used takes no memory
static size_t stacks_bytes;
static std::vector<Store> stores;  // that have not landed
static u32 current, current_program;
static long long clock_reads;

#define threadIdx (Position{current})
#define blockIdx (Position{current_program})
#define gridDim (Position{(u32)programs.size()})
#define mine (programs[current_program])


inline void pause() {
    if (!_setjmp(mine.fibers[current].at)) _longjmp(scheduler, 1);
}

// As pausing again and again would do, but that no turn is taken in vain.
inline void pause_while(const u32& word, u32 bits, u32 so) {
    Fiber& fiber = mine.fibers[current];
    fiber.watched = &word, fiber.bits = bits, fiber.so = so;
    while (fiber.waits()) pause();
    fiber.watched = nullptr;
}

inline void resume(u32 thread) {
    current = thread;
    Fiber& fiber = mine.fibers[thread];
    if (_setjmp(scheduler)) return;
    if (fiber.has_started) _longjmp(fiber.at, 1);
    fiber.has_started = true;
    setcontext(&fiber.start);
}

inline void meet(Meeting& meeting, int count) {
    if (++meeting.arrived == count) {
        meeting.arrived = 0;
        meeting.round++;
    } else
        pause_while(meeting.round, ~0u, meeting.round);
}

inline void __syncwarp() { meet(mine.warps[current / 32], 32); }

template <int COUNT> void sync_threads(int barrier) { meet(mine.meetings[barrier], COUNT); }

template <int COUNT> void arrive_threads(int barrier) {
    Meeting& meeting = mine.meetings[barrier];
    if (++meeting.arrived == COUNT) {
        meeting.arrived = 0;
        meeting.round++;
    }
}

template <class T> T value_of_thread(T value, u32 thread) {
    memcpy(&mine.of_lanes[current][0], &value, sizeof(T));
    __syncwarp();
    T found;
    memcpy(&found, &mine.of_lanes[thread][0], sizeof(T));
    __syncwarp();
    return found;
}

template <class T> T __shfl_xor_sync(u32, T value, int lanes) { return value_of_thread(value, current ^ lanes); }
template <class T> T __shfl_sync(u32, T value, int lane) { return value_of_thread(value, (current & ~31u) + lane); }

inline u32 __reduce_max_sync(u32 lanes, u32 value) {
    for (int other = 16; other; other /= 2) value = max(value, __shfl_xor_sync(lanes, value, other));
    return value;
}

inline float __uint_as_float(u32 bits) { float found; memcpy(&found, &bits, 4); return found; }
inline u32 __float_as_uint(float value) { u32 found; memcpy(&found, &value, 4); return found; }
template <class T> T __ldcg(const T* from) { return *from; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 both = (u64)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; i++) found |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

inline int dot_of_bytes(u32 unsigned_or_signed, u32 signed_bytes, bool is_unsigned, int total) {
    for (int i = 0; i < 4; i++) {
        const u32 byte = unsigned_or_signed >> 8 * i & 255;
        total += (is_unsigned ? (int)byte : (int)(int8_t)byte) * (int8_t)(signed_bytes >> 8 * i & 255);
    }
    return total;
}

inline int __dp4a(int a, int b, int total) { return dot_of_bytes(a, b, false, total); }

inline u32 shared_address(const void* pointer) { return (const char*)pointer - shared; }
inline void launch_dependents() {}
inline void wait_for_dependencies() { pause(); }

inline void end_phase(Barrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.pending = barrier.expected;
    barrier.phase++;
}

inline void init_barrier(u32 barrier, int count) { mine.barriers[barrier] = {count, count, 0, 0}; }
inline void fence_barriers() {}
inline void arrive(u32 barrier, int count = 1) { mine.barriers[barrier].pending -= count; end_phase(mine.barriers[barrier]); }

inline void arrive_and_expect(u32 barrier, int num_bytes) {
    mine.barriers[barrier].bytes += num_bytes;
    arrive(barrier);
}

inline void wait_for(u32 barrier, u32 parity) {
    pause_while(mine.barriers[barrier].phase, 1, parity);
}

inline u64 read_once() { return 0; }

inline Tensor tensor_of(const TensorMap& map) {
    Tensor found;
    static_assert(sizeof(Tensor) <= sizeof(TensorMap));
    memcpy(&found, &map, sizeof found);
    return found;
}

inline void copy_box(u32 to, const TensorMap& map, int a, int b, int c, int d, u32 barrier, u64) {
    mine.copies.push_back({tensor_of(map), {a, b, c, d}, to, barrier});
}

inline void copy_box(u32 to, const TensorMap& map, int a, int b, int c, u32 barrier) {
    mine.copies.push_back({tensor_of(map), {a, b, c, 0}, to, barrier});
}

inline void copy_bytes(u32 to, const void* from, int num_bytes, u32 barrier, u64) {
    mine.copies.push_back({{}, {}, to, barrier, from, (u32)num_bytes});
}

inline void land(const Copy& copy) {
    Barrier& barrier = mine.barriers[copy.barrier];
    if (copy.bytes) {
        memcpy(shared + copy.to, copy.bytes, copy.num_bytes);
        barrier.bytes -= copy.num_bytes;
        end_phase(barrier);
        return;
    }
    const Tensor& tensor = copy.tensor;
    u32 count = 1;
    for (u32 axis = 0; axis < tensor.axes; axis++) count *= tensor.box[axis];
    for (u32 i = 0; i < count; i++) {
        u32 rest = i, to = i * tensor.number_bytes;
        u64 from = 0;
        bool is_inside = true;
        for (u32 axis = 0; axis < tensor.axes; axis++) {
            const u64 at = copy.at[axis] + rest % tensor.box[axis];
            rest /= tensor.box[axis];
            is_inside &= at < tensor.shape[axis];
            from += at * tensor.strides[axis];
        }
        if (tensor.is_swizzled) to ^= (to >> 7 & 7) << 4;
        if (is_inside) memcpy(shared + copy.to + to, tensor.base + from, tensor.number_bytes);
        else memset(shared + copy.to + to, 0, tensor.number_bytes);
    }
    barrier.bytes -= count * tensor.number_bytes;
    end_phase(barrier);
}

inline void land(const Store& store) { memcpy(store.to, &store.word, store.num_bytes); }

template <class T> void land_one(std::vector<T>& waiting) {
    const u32 landed = randomness() % waiting.size();
    const T one = waiting[landed];
    waiting.erase(waiting.begin() + landed);
    land(one);
}

// Stores do not land in order, nor before a counter that is added to later.
template <class T> void store_past_l1(T* to, T word) {
    stores.push_back({to, word, sizeof(T), current_program, current});
    if (randomness() % 64 == 0) return;  // as a rule all is there soon
    land(stores.back());
    stores.pop_back();
}

inline void store_16_past_l1(u32* to, u32 a, u32 b, u32 c, u32 d) {
    for (u32 word : {a, b, c, d}) store_past_l1(to++, word);
}

inline void fence_stores() {
    const auto is_mine = [](const Store& one) { return one.program == current_program && one.thread == current; };
    while (std::any_of(stores.begin(), stores.end(), is_mine)) pause();
}

inline u64 load_past_l1(const u64* from) {
    if (randomness() % 64 == 0) pause();
    return *from;
}

template <int WIDTH> void load_past_l1(u32* words, const u32* from) {
    if (randomness() % 64 == 0) pause();
    memcpy(words, from, 4 * WIDTH);
}

inline u64 add_to_counter(u64* counter, u64 number) { return (*counter += number) - number; }
inline u64 load_counter(const u64* counter) { pause(); return *counter; }
#define clock64() (CLOCK * clock_reads++)
template <int COUNT> void take_registers() {}
template <int COUNT> void give_registers() {}

inline uint4 load_16(u32 address) { uint4 found; memcpy(&found, shared + address, 16); return found; }
inline uint2 load_8(u32 address) { uint2 found; memcpy(&found, shared + address, 8); return found; }
inline u32 load_4(u32 address) { u32 found; memcpy(&found, shared + address, 4); return found; }
inline void store_4(u32 address, u32 value) { memcpy(shared + address, &value, 4); }
inline void store_16(u32 address, u32 a, u32 b, u32 c, u32 d) { u32 all[4] = {a, b, c, d}; memcpy(shared + address, all, 16); }

// Lane 4 g + t has of the first matrix rows g and g + 8, of the second column g, and of the sums columns 2 t and 2 t + 1. dot:
// a sum, and that of what two words have.
template <class Sum, class Dot> void multiply_matrices(Sum* sums, const u64 (&own)[6], Dot dot) {
    memcpy(mine.of_lanes[current], own, sizeof own);
    __syncwarp();
    const u32 warp = current & ~31u, group = current >> 2 & 7, part = current & 3;
    for (int i = 0; i < 4; i++)
        for (u32 k = 0; k < 4; k++) {
            const u64* row = mine.of_lanes[warp + 4 * group + k];
            const u64* column = mine.of_lanes[warp + 4 * (2 * part + i % 2) + k];
            for (int half = 0; half < 2; half++) sums[i] = dot(sums[i], row[i / 2 + 2 * half], column[4 + half]);
        }
    __syncwarp();
}

inline void multiply_bytes(int* sums, u32 a, u32 b, u32 c, u32 d, u32 first, u32 second) {
    multiply_matrices(sums, {a, b, c, d, first, second}, [](int sum, u32 x, u32 y) { return dot_of_bytes(x, y, true, sum); });
}

inline float from_float16(u16 bits) { _Float16 found; memcpy(&found, &bits, 2); return found; }
inline float low_float16(u32 pair) { return from_float16(pair); }
inline float high_float16(u32 pair) { return from_float16(pair >> 16); }
inline u16 to_float16(float value) { _Float16 rounded = value; u16 found; memcpy(&found, &rounded, 2); return found; }

inline u16 to_bfloat16(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Pairs of float16s.
inline u32 pair_of(float first, float second) { return (u32)to_float16(second) << 16 | to_float16(first); }
inline u32 multiply_pairs(u32 a, u32 b) { return pair_of(low_float16(a) * low_float16(b), high_float16(a) * high_float16(b)); }

inline u32 add_products(u32 a, u32 b, u32 sums) {  // a sum of float32 has its bits, but where one is tiny
    const float low = low_float16(a) * low_float16(b) + low_float16(sums);
    return pair_of(low, high_float16(a) * high_float16(b) + high_float16(sums));
}

inline float of_e4m3(u32 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float number = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return (code & 127) == 127 ? NAN : code & 128 ? -number : number;
}

inline uint2 numbers_of_e4m3(u32 codes) {
    static const std::vector<u16> halves = [] {
        std::vector<u16> found(256);
        for (u32 code = 0; code < 256; code++) found[code] = to_float16(of_e4m3(code));
        return found;
    }();
    const auto pair = [&](u32 two) { return (u32)halves[two >> 8 & 255] << 16 | halves[two & 255]; };
    return {pair(codes), pair(codes >> 16)};
}

constexpr float E4M3_UNIT = 0.03125f;

inline float nearest_e4m3(float value) {
    const float size = min(fabsf(value), 448.f), step = ldexpf(1, max(size ? ilogbf(size) : -6, -6) - 3);
    return value != value ? NAN : copysignf(nearbyintf(size / step) * step, value);
}

inline u32 rounded_to_e4m3(float first, float second) {
    return pair_of(nearest_e4m3(first) * E4M3_UNIT, nearest_e4m3(second) * E4M3_UNIT);
}

inline void fence_copies() {}

inline void load_transposed(u32* pairs, u32 row) {
    mine.of_lanes[current][0] = row;
    __syncwarp();
    const u32 warp = current & ~31u, lane = current & 31;
    for (u32 i = 0; i < 4; i++) {
        u16 both[2];
        for (u32 j = 0; j < 2; j++)
            memcpy(both + j, shared + mine.of_lanes[warp + 8 * i + lane % 4 * 2 + j][0] + lane / 4 * 2, 2);
        pairs[i] = both[0] | (u32)both[1] << 16;
    }
    __syncwarp();
}

inline float from_16_bits(u16 bits, int type) { return type == 0 ? __uint_as_float((u32)bits << 16) : from_float16(bits); }

inline void multiply_16_bits(float* sums, u32 a, u32 b, u32 c, u32 d, u32 first, u32 second, int type) {
    multiply_matrices(sums, {a, b, c, d, first, second}, [type](float sum, u32 x, u32 y) {
        sum += from_16_bits(x, type) * from_16_bits(y, type);
        return sum + from_16_bits(x >> 16, type) * from_16_bits(y >> 16, type);
    });
}

inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }

// Runs `count` programs of so many threads, all at once. False: no thread can go on.
template <class Kernel> bool run_programs(u32 count, u32 threads, u32 seed, Kernel kernel) {
    static Kernel* running;
    running = &kernel;
    randomness.seed(seed);
    const u32 landing = seed % 2 ? 3 : 200;  // turns of warps until a copy lands: memory is fast, or slow
    constexpr size_t STACK_BYTES = 32 << 10;
    if (stacks_bytes < count * threads * STACK_BYTES) {
        stacks_bytes = count * threads * STACK_BYTES;
        stacks.reset(new char[stacks_bytes]);
    }
    programs.assign(count, {});
    for (current_program = 0; current_program < count; current_program++) {
        mine.shared.assign(sizeof shared, (char)0xa5);
        mine.warps.assign((threads + 31) / 32, {0, 0});
        mine.fibers.assign(threads, {});
        for (u32 i = 0; i < threads; i++) {
            ucontext_t& fiber = mine.fibers[i].start;
            getcontext(&fiber);
            fiber.uc_stack.ss_sp = &stacks[(current_program * threads + i) * STACK_BYTES];
            fiber.uc_stack.ss_size = STACK_BYTES;
            void (*entry)() = [] {
                (*running)();
                mine.fibers[current].has_ended = true;
                _longjmp(scheduler, 1);
            };
            makecontext(&fiber, entry, 0);
        }
    }
    const auto has_ended = [](const Fiber& fiber) { return fiber.has_ended; };
    const auto is_running = [&](const Running& one) { return !std::all_of(one.fibers.begin(), one.fibers.end(), has_ended); };
    u64 turns = 0;
    while (std::any_of(programs.begin(), programs.end(), is_running)) {
        current_program = randomness() % count;
        memcpy(shared, mine.shared.data(), sizeof shared);
        for (u32 turn = 0; is_running(mine) && turn < 500; turn++, turns++) {
            if (!mine.copies.empty() && randomness() % landing == 0) land_one(mine.copies);
            if (!stores.empty() && randomness() % 8 == 0) land_one(stores);
            const u32 warp = randomness() % mine.warps.size();  // the threads of a warp have turns one after the other
            for (u32 i = 32 * warp; i < std::min(32 * warp + 32, threads); i++)
                if (!mine.fibers[i].has_ended && !mine.fibers[i].waits()) resume(i);
        }
        memcpy(mine.shared.data(), shared, sizeof shared);
        if (turns > 1000000ull * count) return false;
    }
    while (!stores.empty()) land_one(stores);
    return true;
}
