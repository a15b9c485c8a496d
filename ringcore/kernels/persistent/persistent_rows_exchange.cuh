// What programs of persistent_rows.cu tell each other, through the L2 cache.
//
// Macros: those of persistent_context.cuh, and NUM_PROGRAMS, GROUP, HIDDEN, GATED and TYPE.

constexpr int ROWS = 8;  // that a step has at most

// A word is a float32, or a pair of numbers of 16 bits. One that is not written yet is no number, and none that is stored: so
// a reader knows which words are there, and no store has to be waited for.
constexpr u32 UNWRITTEN = ~0u, NO_PAIR = 0x7fc07fc0u;

// Rows of 16-bit numbers are inputs of products: blocks of eight inputs of all rows, [inputs / 8, ROWS, 8], so that what a warp
// loads is contiguous. Of a block of a row pairs are in the order 0, 2, 1, 3, in which tensor cores take them.
constexpr int BLOCK_WORDS = 4 * ROWS;
__host__ __device__ constexpr int words_of(int inputs) { return inputs / 8 * BLOCK_WORDS; }
__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int aligned(int words) { return (words + 3) / 4 * 4; }

// Where the words of a layer are: the stream that QKV reads, times the norm's gain, and of each program the squares of its
// share; q, k and v in float32; partials of the last context of a program that goes on in the next one's, and of its first that
// began in another's, and their log-sum-exps, base 2; attention's result; the stream that gate and up read; what is gated.
constexpr int STREAM_AT = 0, STREAM_WORDS = words_of(HIDDEN) + NUM_PROGRAMS * ROWS;
constexpr int QKV_AT = STREAM_AT + aligned(STREAM_WORDS), PARTIALS_AT = QKV_AT + ROWS * QKV_SIZE;
constexpr int SUMS_AT = PARTIALS_AT + NUM_PROGRAMS * 2 * GROUP * HEAD_SIZE, ATTENDED_AT = SUMS_AT + aligned(NUM_PROGRAMS * 2 * GROUP);
constexpr int MIDDLE_AT = ATTENDED_AT + words_of(OUT_SIZE), GATED_AT = MIDDLE_AT + aligned(STREAM_WORDS);
constexpr int LAYER_WORDS = GATED_AT + words_of(GATED);
static_assert(LAYER_WORDS == EXCHANGED_WORDS && LAYER_WORDS % 4 == 0);

// The scratch in shared memory: sums over warps of a product, or attention's; squares of the stream of warps and rows; angles
// of rows; the plans of the thread that copies and of the others.
constexpr int GROUP_TILES = 4, TILE_ROWS = 8, TILE_SUMS = TILE_ROWS * ROWS;  // see persistent_rows_products.cuh
constexpr int MERGED_HEADS = GROUP > 2 ? 4 : 2;  // whose sums are merged at once
constexpr int HEAD_PITCH = HEAD_SIZE + 8;        // floats, from a head's sums to the next one's: other banks
constexpr int ATTENTION_BYTES = 4 * HEAD_SIZE + NUM_WARPS * MERGED_HEADS * (8 + 4 * HEAD_PITCH);
constexpr int PRODUCT_BYTES = 2 * GROUP_TILES * NUM_WARPS * TILE_SUMS * 4, PLAN_BYTES = 4 * (2 * ROWS + 1);
constexpr int SUMS_SCRATCH_AT = SCRATCH_AT, SQUARES_SCRATCH_AT = SCRATCH_AT + max_of(ATTENTION_BYTES, PRODUCT_BYTES);
constexpr int ANGLES_SCRATCH_AT = SQUARES_SCRATCH_AT + 4 * NUM_WARPS * ROWS, PLANS_SCRATCH_AT = ANGLES_SCRATCH_AT + 4 * ROWS * HEAD_SIZE;
static_assert(PLANS_SCRATCH_AT + 2 * PLAN_BYTES <= SCRATCH_AT + SCRATCH_BYTES);

// Of a pair of inputs of a row, which begins with an even one.
__device__ __forceinline__ int place_of_pair(int input, int row) {
    const int pair = input % 8 / 2;
    return input / 8 * BLOCK_WORDS + row * 4 + pair % 2 * 2 + pair / 2;
}

// A layer has the words of its parity, so that those of the layer before are made unwritten while it runs.
struct Exchange {
    u32* const words;  // [2, LAYER_WORDS]
    int parity;

    __device__ __forceinline__ u32* of_layer() const { return words + parity * LAYER_WORDS; }
    __device__ __forceinline__ u32* of_next_layer() const { return words + (parity ^ 1) * LAYER_WORDS; }

    // A program that was late has read anything: what it tells is no number, and so is then what all compute.
    static __device__ __forceinline__ void store(const Program& program, u32* to, float value) {
        store_past_l1(to, program.is_late() || value != value ? NOT_A_NUMBER : __float_as_uint(value));
    }

    static __device__ __forceinline__ void store_pair(const Program& program, u32* to, float first, float second) {
        store_past_l1(to, program.is_late() ? NO_PAIR : to_pair(first, second, TYPE));
    }

    // Calls `load`, which returns the largest word, until all are written.
    template <class Load> static __device__ __forceinline__ void load_until_written(const Program& program, Load load) {
        program.load_until_written([&] { return (u32)(load() == UNWRITTEN); });
    }

    // A program's share of the words of the layer before, after a barrier that all have arrived at with this layer. They are
    // unwritten everywhere when all are past the next barrier but one; a fence while it waits for the next one anyway.
    __device__ __forceinline__ void clear_others() const {
        u32* const others = of_next_layer();
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < LAYER_WORDS / 4; i += NUM_PROGRAMS * THREADS)
            store_16_past_l1(others + 4 * i, UNWRITTEN, UNWRITTEN, UNWRITTEN, UNWRITTEN);
        fence_stores();
    }
};
