// The split of the context that a program of persistent_layers.cu has, and how its keys and values get to the ring.
//
// Macros: GROUP, LONG_GROUP, MAX_SPLITS, MAX_LONG_SPLITS, MAX_TILES_OF_ONE and LONG_CONTEXT.

__device__ __forceinline__ bool is_long(const Context& context) { return context.length >= LONG_CONTEXT; }

// How a context is split: a program has HEADS query heads of a KV head and tiles of TILE tokens. A context of at most
// TILES_OF_ONE is one split: to merge several takes as long as some more tiles.
template <int HEADS_, int WARP_TOKENS_, int MOST_, int TILES_OF_ONE_> struct SplitTiles {
    static constexpr int HEADS = HEADS_, WARP_TOKENS = WARP_TOKENS_, TILE = WARP_TOKENS * NUM_WARPS, MOST = MOST_;
    static constexpr int TILES_OF_ONE = TILES_OF_ONE_, NUM_GROUPS = NUM_HEADS / HEADS, TILE_SLOTS = TILE / SLOT_TOKENS;
    static_assert(TILE_SLOTS <= NUM_SLOTS && MOST * NUM_GROUPS <= NUM_PROGRAMS);
};

using ShortTiles = SplitTiles<GROUP, 8, MAX_SPLITS, MAX_TILES_OF_ONE>;
using LongTiles = SplitTiles<LONG_GROUP, 16, MAX_LONG_SPLITS, 0>;

// Split-KV: the split of a program, or none.
struct Split {
    const Context context;
    int num_splits, index, first_head, kv_head, first, end;  // the latter two are tiles
    bool is_live;       // of a context without tokens one split of a group is, without tiles
    bool writes_cache;  // one program of those that have the last token

    __device__ __forceinline__ Split(const Context& context) : context(context) {
        if (is_long(context)) take<LongTiles>();
        else take<ShortTiles>();
    }

    template <class Tiles> __device__ __forceinline__ void take() {
        constexpr int GROUPS = Tiles::NUM_GROUPS, GROUPS_OF_KV = GROUPS / NUM_KV_HEADS;
        const int num_tiles = (context.length + Tiles::TILE - 1) / Tiles::TILE, group = blockIdx.x % GROUPS;
        num_splits = num_tiles <= Tiles::TILES_OF_ONE ? 1 : min(num_tiles, Tiles::MOST);
        index = blockIdx.x / GROUPS;
        first_head = group * Tiles::HEADS;
        kv_head = group / GROUPS_OF_KV;
        is_live = index < num_splits;
        first = is_live ? index * num_tiles / num_splits : 0;
        end = is_live ? (index + 1) * num_tiles / num_splits : 0;
        writes_cache = end == num_tiles && group % GROUPS_OF_KV == 0 && context.length;
    }
};

// How the thread that copies puts keys and values of a split to the ring.
struct SplitCopies {
    const Context context;
    int kv_head, first, end, pages[PIECES];  // tokens; pages of the first slot's pieces

    __device__ __forceinline__ SplitCopies(const Split& split) : context(split.context), kv_head(split.kv_head) {
        const int tile = is_long(context) ? LongTiles::TILE : ShortTiles::TILE;
        first = split.first * tile;
        end = split.end * tile;
        load_pages(pages, first);
    }

    __device__ __forceinline__ void load_pages(int* of_pieces, int start) const {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int token = start + i * PIECE;
            of_pieces[i] = token < end && token + 1 < context.length ? context.page_of(token) : 0;
        }
    }

    // Not the last token, which this step writes. Pages of a slot, and of the next layer's first one, are loaded before the
    // slot ahead of it is copied. Of a long context all slots may be on their way.
    __device__ __forceinline__ void copy(Producer& producer, const u16* kv_cache) {
        constexpr int BYTES = 2 * PIECE * HEAD_SIZE;
        const int window = is_long(context) ? NUM_SLOTS : 0;
#pragma unroll 1
        for (int start = first; start < end; start += SLOT_TOKENS) {
            int next[PIECES];
            load_pages(next, start + SLOT_TOKENS < end ? start + SLOT_TOKENS : first);
            producer.begin(min(PIECES, max(0, (context.length - 2 - start + PIECE) / PIECE)) * 2 * BYTES, window);
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                const int token = start + i * PIECE;
                if (token + 1 >= context.length) break;
                const u16* const key = kv_cache + Context::place_of_key(kv_head, pages[i], token);
                producer.copy(i * BYTES, key, BYTES);
                producer.copy(SLOT_VALUES_AT + i * BYTES, key + VALUES, BYTES);
            }
            producer.end();
#pragma unroll
            for (int i = 0; i < PIECES; i++) pages[i] = next[i];
        }
    }
};
