// A program of persistent_layers.cu: its shared memory, its barrier over the grid, and how programs tell each other numbers.
//
// Macros: NUM_PROGRAMS, NUM_BARRIERS (over the grid, of a layer), NUM_SLOTS, SLOT_BYTES, SCRATCH_BYTES and WEIGHT_BYTES (of a
// weight: 1 or 2).

constexpr int NUM_WARPS = 8, THREADS = 32 * NUM_WARPS;  // consumers; of four more, one loads weights
constexpr long long DEADLINE = 2000000000;  // cycles, about a second: programs that have not arrived do not run

constexpr int SCRATCH_AT = NUM_SLOTS * SLOT_BYTES;           // sums of units, attention's, or a row that warps share
constexpr int SQUARES_AT = SCRATCH_AT + SCRATCH_BYTES;
constexpr int IS_WAITING_AT = SQUARES_AT + 4 * NUM_WARPS, IS_LATE_AT = IS_WAITING_AT + 4;
constexpr int BARRIERS_AT = IS_LATE_AT + 4, END_AT = BARRIERS_AT + 16 * NUM_SLOTS;
static_assert(SCRATCH_AT % 16 == 0);

// A thread's inputs of a part: vectors of as many numbers as divide their count, which is V, at most 16 bytes of weights.
constexpr int WIDEST = 16 / WEIGHT_BYTES;
template <int V> constexpr int VECTOR = V % WIDEST == 0 ? WIDEST : V % 8 == 0 ? 8 : V % 4 == 0 ? 4 : 2;

template <int V> __device__ __forceinline__ int input_of(int i) {
    return (i / VECTOR<V> * THREADS + threadIdx.x) * VECTOR<V> + i % VECTOR<V>;
}

// What a thread has of SIZE numbers of a row: as many as each other thread; or, where these do not come out even, vectors of
// as many numbers as one takes, or of eight, of which some threads have one less. Codes: always vectors, of 4, 8 or 16, by
// which a row takes the fewest instructions, for one of W numbers W + 5.
template <int SIZE> struct Share {
    static __host__ __device__ constexpr int vectors(int width) { return (SIZE + width * THREADS - 1) / (width * THREADS); }
    static __host__ __device__ constexpr bool is_better(int width, int other) {
        return vectors(width) * (width + 5) < vectors(other) * (other + 5);
    }

    static constexpr int EVEN = SIZE / THREADS, HALF_WIDE = is_better(4, 8) ? 4 : 8;
    static constexpr int OF_CODES = is_better(HALF_WIDE, 16) ? HALF_WIDE : 16;
    static constexpr int OF_NUMBERS = SIZE % (2 * THREADS) == 0 ? EVEN : EVEN < 2 ? 2 : EVEN < 4 ? 4 : 8 * vectors(8);
    static constexpr int V = WEIGHT_BYTES == 1 ? OF_CODES * vectors(OF_CODES) : OF_NUMBERS;
    static constexpr int WIDTH = VECTOR<V>, FULL = SIZE / (THREADS * WIDTH);  // vectors that every thread has
    static constexpr bool IS_EVEN = FULL * WIDTH == V;
    static_assert(SIZE % WIDTH == 0);

    static __device__ __forceinline__ bool has_last_vector() {
        return (int)threadIdx.x * WIDTH < SIZE - FULL * THREADS * WIDTH;
    }
};

// A word is a float32 whose lowest four bits are a tag: by how often its place was written. So a reader knows whether it
// has the word of this time, and no store has to be waited for: without tags, each barrier would begin with a fence.
__device__ __forceinline__ float number_of(u32 word) { return __uint_as_float(word & ~15u); }

// The consumers of a program.
struct Program {
    char* const shared;
    u64* const counter;  // of arrivals, never reset
    const u32 base;
    const int lane, warp;
    u64 target, arrived;  // the latter of the first thread: how many arrivals with its own
    int num_passed = 0;   // barriers that this program did not arrive at: it does with the next one

    __device__ __forceinline__ Program(char* shared, u64* counter)
        : shared(shared), counter(counter), base(shared_address(shared)), lane(threadIdx.x & 31), warp(threadIdx.x >> 5) {}

    __device__ __forceinline__ void sync() const { sync_threads<THREADS>(2); }

    static constexpr u64 OF_LAYER = NUM_BARRIERS * NUM_PROGRAMS;  // arrivals

    // Of all programs that run, this one has not arrived, so that none is past the first barriers.
    __device__ __forceinline__ void begin() { target = load_counter(counter) / OF_LAYER * OF_LAYER; }

    // How many layers there were before, in all launches, and this one.
    __device__ __forceinline__ u32 layer_tag() const { return (u32)(target / OF_LAYER) + 1; }

    __device__ __forceinline__ bool is_late() const { return load_4(base + IS_LATE_AT); }

    __device__ __forceinline__ void arrive_at_grid() {
        sync();
        target += NUM_PROGRAMS;
        if (threadIdx.x == 0) arrived = add_to_counter(counter, num_passed + 1) + num_passed + 1;
        num_passed = 0;
        waits_for_row();
    }

    // Nobody waits for it, in any program.
    __device__ __forceinline__ void pass_barrier() {
        target += NUM_PROGRAMS;
        num_passed++;
    }

    __device__ __forceinline__ void waits_for_row() const {
        if (threadIdx.x == 0) store_4(base + IS_WAITING_AT, 1);
    }

    __device__ __forceinline__ void wait_for_grid() const {
        if (threadIdx.x == 0 && arrived < target) {
            const long long start = clock64();
            while (load_counter(counter) < target && !is_late())
                if (clock64() - start > DEADLINE) store_4(base + IS_LATE_AT, 1);
        }
        sync();
    }

    __device__ __forceinline__ void has_row() const {
        if (threadIdx.x == 0) store_4(base + IS_WAITING_AT, 0);
    }

    // A program that was late has read anything: what it tells is no number, and so is then what all compute.
    __device__ __forceinline__ void store(u32* to, float value, u32 tag) const {
        store_past_l1(to, (is_late() ? NOT_A_NUMBER : __float_as_uint(value) & ~15u) | (tag & 15));
    }

    // A number with a whole tag, for a place that is not written in every layer.
    __device__ __forceinline__ void store_with_tag(u64* to, float value, u32 tag) const {
        store_past_l1(to, (u64)tag << 32 | (is_late() ? NOT_A_NUMBER : __float_as_uint(value)));
    }

    static __device__ __forceinline__ u32 differs(u64 pair, u32 tag) { return (u32)(pair >> 32) != tag; }
    static __device__ __forceinline__ float number_with_tag(u64 pair) { return __uint_as_float((u32)pair); }

    // COUNT vectors of WIDTH words, `stride` words apart. Returns bits of which the lowest four are 0 if all have the tag.
    template <int COUNT, int WIDTH> static __device__ __forceinline__ u32 load(u32* words, const u32* from, int stride, u32 tag) {
        u32 differs = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) load_past_l1<WIDTH>(words + i * WIDTH, from + i * stride);
#pragma unroll
        for (int i = 0; i < COUNT * WIDTH; i++) differs |= words[i] ^ tag;
        return differs;
    }

    // A thread's numbers of SIZE words from `from` on; of a vector that it does not have they are 0.
    template <int SIZE> static __device__ __forceinline__ u32 load_inputs(u32* words, const u32* from, u32 tag) {
        constexpr int W = Share<SIZE>::WIDTH, COUNT = Share<SIZE>::FULL;
        from += threadIdx.x * W;
        u32 differs = load<COUNT, W>(words, from, THREADS * W, tag);
        if (Share<SIZE>::IS_EVEN) return differs;
        if (Share<SIZE>::has_last_vector())
            return differs | load<1, W>(words + COUNT * W, from + COUNT * THREADS * W, 0, tag);
#pragma unroll
        for (int i = 0; i < W; i++) words[COUNT * W + i] = tag;
        return differs;
    }

    // Calls `load` until all words have their tag.
    template <class Load> __device__ __forceinline__ void load_until_written(Load load) const {
        const long long start = clock64();
        while ((load() & 15) && !is_late())
            if (clock64() - start > DEADLINE) store_4(base + IS_LATE_AT, 1);
    }
};

// Sums over groups of LANES lanes of N numbers of each lane. A lane gets that of the number lane % LANES / (LANES / N).
template <int N, int LANES = 32> __device__ __forceinline__ float sum_over_lanes(float* numbers, int lane) {
    int lanes = LANES / 2;
#pragma unroll
    for (int n = N / 2; n; n /= 2, lanes /= 2) {
        const bool is_upper = lane & lanes;
#pragma unroll
        for (int i = 0; i < n; i++) {
            const float given = is_upper ? numbers[i] : numbers[i + n];
            numbers[i] = (is_upper ? numbers[i + n] : numbers[i]) + __shfl_xor_sync(~0u, given, lanes);
        }
    }
#pragma unroll
    for (; lanes; lanes /= 2) numbers[0] += __shfl_xor_sync(~0u, numbers[0], lanes);
    return numbers[0];
}
