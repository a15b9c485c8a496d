// A row's tokens in the KV cache, for the persistent kernels, and how many of them a slot of the ring has.
//
// Macros: NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE and SLOT_BYTES.

constexpr int OUT_SIZE = NUM_HEADS * HEAD_SIZE, KV_SIZE = NUM_KV_HEADS * HEAD_SIZE, QKV_SIZE = OUT_SIZE + 2 * KV_SIZE;
constexpr int VALUES = KV_SIZE * BLOCK_SIZE;  // of a page of the cache, from a key to its value

// A slot of the ring has keys and values of SLOT_TOKENS tokens, and is copied by pieces of a page.
constexpr int ROOM = SLOT_BYTES / (4 * HEAD_SIZE), SLOT_TOKENS = ROOM >= 64 ? 64 : ROOM >= 32 ? 32 : 16;
constexpr int SLOT_VALUES_AT = 2 * SLOT_TOKENS * HEAD_SIZE;
__host__ __device__ constexpr int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }
constexpr int PIECE = greatest_common_divisor(SLOT_TOKENS, BLOCK_SIZE), PIECES = SLOT_TOKENS / PIECE;
static_assert(ROOM >= SLOT_TOKENS);

// The tokens of the row, with that of this step, which is not in the cache yet.
struct Context {
    const int* const block_table;
    const int length;

    __device__ __forceinline__ Context(const int* seq_len, const int* block_table)
        : block_table(block_table), length(__ldcg(seq_len)) {}
    __device__ __forceinline__ Context(int length, const int* block_table) : block_table(block_table), length(length) {}

    // By the L1 cache: the thread that copies would wait for the L2 cache at each slot.
    __device__ __forceinline__ int page_of(int token) const { return block_table[token / BLOCK_SIZE]; }

    static __device__ __forceinline__ size_t place_of_key(int kv_head, int page, int token) {
        return (size_t)page * (2 * VALUES) + (kv_head * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_SIZE;
    }
};
