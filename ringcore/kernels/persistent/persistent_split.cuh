// The split of the context that a program of persistent_layers.cu has, and how its keys and values get to the ring.
//
// Macros: NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, GROUP, BLOCK_SIZE, MAX_SPLITS and MAX_TILES_OF_ONE.

constexpr int OUT_SIZE = NUM_HEADS * HEAD_SIZE, KV_SIZE = NUM_KV_HEADS * HEAD_SIZE, QKV_SIZE = OUT_SIZE + 2 * KV_SIZE;
constexpr int NUM_GROUPS = NUM_HEADS / GROUP, GROUPS_OF_KV = NUM_GROUPS / NUM_KV_HEADS;  // a program has a group of query heads

__host__ __device__ constexpr int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }

// Split-KV: a program has GROUP query heads of a KV head, and a split of the context, which is tiles of TILE tokens, or
// none. A short context is one split: to merge several takes as long as some more tiles.
struct Split {
    static constexpr int WARP_TOKENS = 8, TILE = WARP_TOKENS * NUM_WARPS;
    static constexpr int ROOM = SLOT_BYTES / (4 * HEAD_SIZE);  // tokens
    static constexpr int SLOT_TOKENS = ROOM >= TILE ? TILE : ROOM >= TILE / 2 ? TILE / 2 : TILE / 4;
    static constexpr int TILE_SLOTS = TILE / SLOT_TOKENS, VALUES_AT = 2 * SLOT_TOKENS * HEAD_SIZE;  // in a slot
    static constexpr int PIECE = greatest_common_divisor(SLOT_TOKENS, BLOCK_SIZE);                  // tokens of a copy
    static_assert(ROOM >= SLOT_TOKENS && TILE_SLOTS <= NUM_SLOTS);

    const int* const block_table;
    const int length, num_tiles, num_splits, group, index;
    const bool is_live;    // of a context without tokens one split of a group is, without tiles
    const int first, end;  // tiles

    __device__ __forceinline__ Split(const int* seq_len, const int* block_table)
        : block_table(block_table), length(__ldcg(seq_len)), num_tiles((length + TILE - 1) / TILE),
          num_splits(num_tiles <= MAX_TILES_OF_ONE ? 1 : min(num_tiles, MAX_SPLITS)), group(blockIdx.x % NUM_GROUPS),
          index(blockIdx.x / NUM_GROUPS),
          is_live(index < num_splits), first(is_live ? index * num_tiles / num_splits : 0),
          end(is_live ? (index + 1) * num_tiles / num_splits : 0) {}

    __device__ __forceinline__ int kv_head() const { return group / GROUPS_OF_KV; }

    // In a layer's cache; that of the value is VALUES numbers after it.
    static constexpr int VALUES = KV_SIZE * BLOCK_SIZE;

    __device__ __forceinline__ size_t place_of_key(int page, int token) const {
        return (size_t)page * (2 * VALUES) + (kv_head() * BLOCK_SIZE + token % BLOCK_SIZE) * HEAD_SIZE;
    }

    __device__ __forceinline__ int page_of(int token) const { return __ldcg(block_table + token / BLOCK_SIZE); }

    // Pages of a tile's pieces. Those of the first tile are kept from layer to layer.
    struct Pages {
        int tile = -1, of_pieces[TILE / PIECE];

        __device__ __forceinline__ void load(const Split& split, int of_tile) {
            if (tile == of_tile) return;
            tile = of_tile;
#pragma unroll
            for (int i = 0; i < TILE / PIECE; i++) {
                const int token = tile * TILE + i * PIECE;
                of_pieces[i] = token + 1 < split.length ? split.page_of(token) : 0;
            }
        }
    };

    // What the cache has of the tiles: not the last token, which this step writes.
    __device__ __forceinline__ void copy_tiles(Producer& producer, const u16* kv_cache, Pages& pages) const {
        constexpr int PIECES = SLOT_TOKENS / PIECE, BYTES = 2 * PIECE * HEAD_SIZE;
#pragma unroll 1
        for (int tile = first; tile < end; tile++) {
            pages.load(*this, tile);
#pragma unroll
            for (int slot = 0; slot < TILE_SLOTS; slot++) {
                const int start = tile * TILE + slot * SLOT_TOKENS;
                producer.begin(min(PIECES, max(0, (length - 2 - start + PIECE) / PIECE)) * 2 * BYTES);
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    const int token = start + i * PIECE;
                    if (token + 1 >= length) break;
                    const u16* const key = kv_cache + place_of_key(pages.of_pieces[slot * PIECES + i], token);
                    producer.copy(i * BYTES, key, BYTES);
                    producer.copy(VALUES_AT + i * BYTES, key + VALUES, BYTES);
                }
                producer.end();
            }
        }
    }
};
