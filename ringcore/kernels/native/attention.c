// Paged attention on a CPU: the keys and values of a step's tokens are written to their slots, then each query row
// attends over the pages of its sequence.
//
// A row is one query head of one token. A work item has the rows of some tokens of a sequence that share a KV head, and
// a range of spans of SPAN tokens. Of each span it computes the scores, their maximum, the sum of their exponentials
// and the weighted sum of the values; spans are merged in their order (log-sum-exp), by the item itself, or after all
// items where a row's spans are several items' (split-KV). So what a row computes depends on its own keys and values
// alone: not on the rows beside it, the number of threads, or how a prompt is cut into steps.

#include <math.h>
#include <stdlib.h>

#include "vectors.h"
#include "threads.h"

enum { SPAN = 256, TILE = 16, MOST_ROWS = 64 };
enum { SCORE_ROWS = WIDTH == 16 ? 8 : 4, VALUE_ROWS = WIDTH == 16 ? 6 : 2, VALUE_WIDTH = 64 };

typedef struct {
    int64_t block_size, head_size, value_size, num_heads, num_kv_heads, heads_per_section, num_blocks;
    int64_t window, chunk;  // 0: none
    int32_t kind;
} Layout;

typedef struct {
    int32_t seq, token, num_tokens;  // of the sequence, counted from its first query token
    int32_t first_span, end_span;    // those that a row of the item sees, or its share of them
    int32_t partial;                 // of split rows: the first row of the partial results; -1 where the item has all spans
} Item;

typedef struct {
    const Layout *layout;
    const int32_t *starts, *lens, *table;  // of sequences: the first query token, all tokens, the blocks
    int64_t num_seqs, table_stride;
    const Item *items;
    int64_t num_items, num_partials;
    const int64_t *slots;
    int64_t num_tokens, num_operations;
} Step;

typedef struct {
    const Step *const *steps;  // the one that is read whenever a program runs
    const Step *step;
    const uint8_t *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;  // numbers from token to token
    uint8_t *keys, *values;                          // pages
    uint8_t *out;                                    // [num_tokens, num_heads, value_size]
    const float *sinks;
    float scale, softcap;  // softcap 0: none
    Program *program;      // its scratch has partial results: [num_partials * num_kv_heads, value_size + 2], weighted sums, maximum, sum
} Call;

// Pages of one head: of keys, or of values, of `size` numbers a token.
typedef struct {
    uint8_t *first;  // the page in block 0
    int64_t page_bytes, token_bytes;
} Pages;

INLINE Pages pages_of(const Layout *l, uint8_t *all, int64_t head, int64_t size) {
    int64_t section = head / l->heads_per_section, within = head % l->heads_per_section;
    int64_t token = size * bytes_of_number(l->kind), page = token * l->block_size;
    uint8_t *first = all + (section * l->num_blocks * l->heads_per_section + within) * page;
    return (Pages){first, l->heads_per_section * page, token};
}

// ---------------------------------------------------------------------------------------------------------------------
// Writes

static void write_numbers(uint8_t *to, const uint8_t *from, int64_t n, int32_t kind) {
    if (kind != FLOAT16) {
        memcpy(to, from, n * bytes_of_number(kind));
        return;
    }
    const uint16_t *numbers = (const uint16_t *)from;
    uint16_t *out = (uint16_t *)to;
    for (int64_t i = 0; i < n; i++) {  // finite: see torch_sdpa
        uint16_t bits = numbers[i], rest = bits & 0x7fff;
        out[i] = rest > 0x7c00 ? 0 : rest == 0x7c00 ? (bits & 0x8000) | 0x7bff : bits;
    }
}

static void write_tokens(const Call *call, int64_t first, int64_t end) {
    const Layout *l = call->step->layout;
    int64_t width = bytes_of_number(l->kind);
    for (int64_t head = 0; head < l->num_kv_heads; head++) {
        Pages keys = pages_of(l, call->keys, head, l->head_size), values = pages_of(l, call->values, head, l->value_size);
        const uint8_t *key = call->key + head * keys.token_bytes, *value = call->value + head * values.token_bytes;
        for (int64_t token = first; token < end; token++) {
            int64_t slot = call->step->slots[token], block = slot / l->block_size, at = slot % l->block_size;
            uint8_t *to = keys.first + block * keys.page_bytes + at * keys.token_bytes;
            write_numbers(to, key + token * call->key_stride * width, l->head_size, l->kind);
            to = values.first + block * values.page_bytes + at * values.token_bytes;
            write_numbers(to, value + token * call->value_stride * width, l->value_size, l->kind);
        }
    }
}

enum { WRITTEN = 16 };  // tokens of an item

static void write_turns(void *data, int64_t first, int64_t end) {
    const Call *call = data;
    int64_t n = call->step->num_tokens;
    write_tokens(call, WRITTEN * first, WRITTEN * end < n ? WRITTEN * end : n);
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores

#define SWAP(a, b, low, high)                                      \
    {                                                              \
        f32x16 x = a, y = b;                                       \
        a = (f32x16)__builtin_shuffle((i32x16)x, (i32x16)y, low);  \
        b = (f32x16)__builtin_shuffle((i32x16)x, (i32x16)y, high); \
    }

// Exchanges one bit of the row with the same bit of the column.
#define EXCHANGE(bit)                                                            \
    {                                                                            \
        i32x16 low, high;                                                        \
        UNROLLED for (int i = 0; i < 16; i++) {                                  \
            low[i] = i & bit ? 16 + (i ^ bit) : i;                               \
            high[i] = i & bit ? 16 + i : i | bit;                                \
        }                                                                        \
        UNROLLED for (int i = 0; i < 16; i++) if (!(i & bit)) SWAP(v[i], v[i | bit], low, high) \
    }

INLINE void transpose16(f32x16 *v) {
    EXCHANGE(8)
    EXCHANGE(4)
    EXCHANGE(2)
    EXCHANGE(1)
}

// tile [head_size rounded up to 16][16]: the keys of n tokens, from `first` on; after them those of the last. The keys
// of the tile after it, up to token `end`, are prefetched: 16 rows at a time are no stream that the processor follows.
INLINE void load_keys(const Layout *l, Pages keys, const int32_t *blocks, int64_t first, int64_t end, float *tile,
                      int32_t kind) {
    int64_t size = l->head_size, width = bytes_of_number(kind), block = first / l->block_size;
    int64_t at = first - block * l->block_size, n = end - first;
    const uint8_t *from[TILE], *page = keys.first + blocks[block] * keys.page_bytes;
    for (int i = 0; i < 2 * TILE; i++) {
        if (i < TILE) from[i] = page + at * keys.token_bytes;
        else if (i < n)
            for (int64_t b = 0; b < keys.token_bytes; b += 64) __builtin_prefetch(page + at * keys.token_bytes + b);
        if (i + 1 < n && ++at == l->block_size) {
            at = 0;
            page = keys.first + blocks[++block] * keys.page_bytes;
        }
    }
    for (int64_t d = 0; d < size; d += 16) {
        f32x16 v[16];
        if (size - d >= 16)
            UNROLLED for (int i = 0; i < 16; i++) v[i] = load16(from[i] + d * width, kind);
        else
            for (int i = 0; i < 16; i++) v[i] = load_up_to(from[i] + d * width, size - d, kind);
        transpose16(v);
        UNROLLED for (int i = 0; i < 16; i++) memcpy(tile + 16 * (d + i), v + i, 64);
    }
}

INLINE void score_rows(const float *query, int64_t size, const float *tile, float *scores, const int n) {
    f32x16 sums[SCORE_ROWS];
    UNROLLED for (int r = 0; r < n; r++) sums[r] = splat(0);
    for (int64_t d = 0; d < size; d++) {
        f32x16 key = floats_of(tile + 16 * d);
        UNROLLED for (int r = 0; r < n; r++) sums[r] = fma16(splat(query[r * size + d]), key, sums[r]);
    }
    UNROLLED for (int r = 0; r < n; r++) memcpy(scores + r * SPAN, sums + r, 64);
}

static void score_tile(const float *query, int64_t size, const float *tile, float *scores, int64_t rows) {
    for (; rows >= SCORE_ROWS; rows -= SCORE_ROWS, query += SCORE_ROWS * size, scores += SCORE_ROWS * SPAN)
        score_rows(query, size, tile, scores, SCORE_ROWS);
    switch (rows) {
        case 1: score_rows(query, size, tile, scores, 1); break;
        case 2: score_rows(query, size, tile, scores, 2); break;
        case 3: score_rows(query, size, tile, scores, 3); break;
#if defined(__AVX512F__)
        case 4: score_rows(query, size, tile, scores, 4); break;
        case 5: score_rows(query, size, tile, scores, 5); break;
        case 6: score_rows(query, size, tile, scores, 6); break;
        case 7: score_rows(query, size, tile, scores, 7); break;
#endif
    }
}

// Scores of the columns first to end of a span -> exponentials less the maximum, of all others 0; the maximum and sum.
static void softmax(float *scores, int64_t first, int64_t end, float softcap, float *maximum, float *sum) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t start = first / TILE * TILE, stop = (end + TILE - 1) / TILE * TILE;
    f32x16 most = splat(-INFINITY), all = splat(0);
    for (int64_t i = start; i < stop; i += TILE) {
        f32x16 x = floats_of(scores + i);
        if (softcap > 0) x = softcap * (1.0f - 2.0f / (exp16(2.0f / softcap * x) + 1.0f));
        i32x16 column = lanes + (int32_t)i;
        x = select16((column >= (int32_t)first) & (column < (int32_t)end), x, splat(-INFINITY));
        memcpy(scores + i, &x, 64);
        most = select16(x > most, x, most);
    }
    float top = most[0];
    for (int i = 1; i < 16; i++) top = most[i] > top ? most[i] : top;
    for (int64_t i = start; i < stop; i += TILE) {
        f32x16 x = floats_of(scores + i);
        x = select16(x == splat(-INFINITY), splat(0), exp16(x - top));
        memcpy(scores + i, &x, 64);
        all += x;
    }
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) all[i] += all[i + step];
    *maximum = top;
    *sum = all[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// Values

// sums [n][stride], from column d on: + weights x values, of the tokens `first` to `end`, `weights` of the first.
INLINE void add_values(const Layout *l, Pages values, const int32_t *blocks, int64_t first, int64_t end, int64_t d,
                       const float *weights, float *sums, int64_t stride, int32_t kind, const int n, const int wide) {
    int64_t size = l->value_size, width = bytes_of_number(kind), block = first / l->block_size;
    int64_t at = first - block * l->block_size;
    f32x16 all[VALUE_ROWS][4];
    UNROLLED for (int r = 0; r < n; r++)
        UNROLLED for (int i = 0; i < wide; i++) all[r][i] = floats_of(sums + r * stride + d + 16 * i);
    for (; first < end; at = 0) {
        int64_t count = l->block_size - at;
        if (count > end - first) count = end - first;
        const uint8_t *from = values.first + blocks[block++] * values.page_bytes + at * values.token_bytes + d * width;
        for (int64_t t = 0; t < count; t++, from += values.token_bytes) {
            f32x16 value[4];
            UNROLLED for (int i = 0; i < wide; i++)
                value[i] = wide == 4 ? load16(from + 16 * i * width, kind)
                                     : load_up_to(from + 16 * i * width, size - d - 16 * i, kind);
            UNROLLED for (int r = 0; r < n; r++) {
                f32x16 weight = splat(weights[r * SPAN + t]);
                UNROLLED for (int i = 0; i < wide; i++) all[r][i] = fma16(weight, value[i], all[r][i]);
            }
        }
        first += count;
        weights += count;
    }
    UNROLLED for (int r = 0; r < n; r++)
        UNROLLED for (int i = 0; i < wide; i++) memcpy(sums + r * stride + d + 16 * i, &all[r][i], 64);
}

#define VALUES_OF(n)                                                                                                  \
    for (d = 0; d + VALUE_WIDTH <= l->value_size; d += VALUE_WIDTH)                                                   \
        add_values(l, values, blocks, first, end, d, weights, sums, stride, kind, n, 4);                              \
    for (; d < l->value_size; d += 16) add_values(l, values, blocks, first, end, d, weights, sums, stride, kind, n, 1);

INLINE void weigh_values(const Layout *l, Pages values, const int32_t *blocks, int64_t first, int64_t end,
                         const float *weights, float *sums, int64_t stride, int64_t rows, int32_t kind) {
    int64_t d;
    for (; rows >= VALUE_ROWS; rows -= VALUE_ROWS, weights += VALUE_ROWS * SPAN, sums += VALUE_ROWS * stride) {
        VALUES_OF(VALUE_ROWS)
    }
    switch (rows) {
        case 1: VALUES_OF(1) break;
#if defined(__AVX512F__)
        case 2: VALUES_OF(2) break;
        case 3: VALUES_OF(3) break;
        case 4: VALUES_OF(4) break;
        case 5: VALUES_OF(5) break;
#endif
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows

// A state is [stride] weighted sums, of which the last two places are the maximum and the sum of exponentials.
INLINE void merge(float *state, const float *other, int64_t stride) {
    float top = state[stride - 2], more = other[stride - 2];
    if (other[stride - 1] == 0) return;
    if (state[stride - 1] == 0) {
        memcpy(state, other, 4 * stride);
        return;
    }
    float most = top > more ? top : more, a = expf(top - most), b = expf(more - most);
    for (int64_t i = 0; i < stride - 2; i++) state[i] = fmaf(state[i], a, other[i] * b);
    state[stride - 2] = most;
    state[stride - 1] = fmaf(state[stride - 1], a, other[stride - 1] * b);
}

INLINE int64_t first_seen(const Layout *l, int64_t position) {
    if (l->window) return position + 1 > l->window ? position + 1 - l->window : 0;
    return l->chunk ? position / l->chunk * l->chunk : 0;
}

static void finish(const Call *call, int64_t token, int64_t query_head, float *state, int64_t stride) {
    const Layout *l = call->step->layout;
    float scale = 1, sum = state[stride - 1];
    if (call->sinks) {
        float sink = call->sinks[query_head], top = state[stride - 2], most = top > sink ? top : sink;
        scale = expf(top - most);
        sum = sum * scale + expf(sink - most);
    }
    scale /= sum;
    uint8_t *out = call->out + (token * l->num_heads + query_head) * l->value_size * bytes_of_number(l->kind);
    for (int64_t d = 0; d < l->value_size; d += 16)
        store_up_to(out + d * bytes_of_number(l->kind), scale * floats_of(state + d), l->value_size - d, l->kind);
}

static _Thread_local float *scratch;
static _Thread_local int64_t scratch_size;

static float *scratch_of(int64_t size) {  // kept for the next call: allocating it costs more than most items
    if (size > scratch_size) {
        free(scratch);
        scratch = aligned_alloc(64, (4 * size + 63) / 64 * 64);
        scratch_size = scratch ? size : 0;
    }
    return scratch;
}

INLINE void attend(const Call *call, const Item *item, int64_t head, const int32_t kind) {
    const Step *step = call->step;
    const Layout *l = step->layout;
    int64_t group = l->num_heads / l->num_kv_heads, rows = item->num_tokens * group, width = bytes_of_number(kind);
    int64_t size = l->head_size, padded = (size + 15) / 16 * 16, stride = (l->value_size + 15) / 16 * 16 + 16;
    float *queries = scratch_of(rows * (size + SPAN + 2 * stride) + 16 * padded + 64);
    if (!queries) abort();  // a few hundred KiB
    float *tile = queries + (rows * size + 15) / 16 * 16, *scores = tile + 16 * padded;
    float *states = scores + rows * SPAN, *spans = states + rows * stride;
    Pages keys = pages_of(l, call->keys, head, size), values = pages_of(l, call->values, head, l->value_size);
    const int32_t *blocks = step->table + item->seq * step->table_stride;
    int64_t token = step->starts[item->seq] + item->token;
    int64_t position = step->lens[item->seq] - (step->starts[item->seq + 1] - token);

    for (int64_t row = 0; row < rows; row++) {
        int64_t number = (token + row / group) * call->query_stride + (head * group + row % group) * size;
        for (int64_t d = 0; d < size; d += 16) {
            f32x16 x = call->scale * load_up_to(call->query + (number + d) * width, size - d, kind);
            memcpy(queries + row * size + d, &x, 4 * (size - d < 16 ? size - d : 16));
        }
    }
    memset(states, 0, 4 * rows * stride);
    int64_t lowest = first_seen(l, position), highest = position + item->num_tokens;
    for (int64_t span = item->first_span; span < item->end_span; span++) {
        int64_t start = span * SPAN, low = lowest > start ? lowest - start : 0;
        int64_t high = highest - start < SPAN ? highest - start : SPAN;
        for (int64_t i = low / TILE * TILE; i < high; i += TILE) {
            load_keys(l, keys, blocks, start + i, start + high, tile, kind);
            score_tile(queries, size, tile, scores + i, rows);
        }
        memset(spans, 0, 4 * rows * stride);
        for (int64_t row = 0; row < rows; row++) {
            int64_t at = position + row / group, first = first_seen(l, at) - start, end = at + 1 - start;
            if (first < 0) first = 0;
            if (end > SPAN) end = SPAN;
            float *weights = scores + row * SPAN, *state = spans + row * stride;
            if (first >= end) {
                memset(weights, 0, 4 * SPAN);
                continue;
            }
            softmax(weights, first, end, call->softcap, state + stride - 2, state + stride - 1);
            memset(weights + low / TILE * TILE, 0, 4 * (first / TILE - low / TILE) * TILE);
            int64_t stop = (end + TILE - 1) / TILE * TILE;
            if (stop < high) memset(weights + stop, 0, 4 * (high - stop));
        }
        weigh_values(l, values, blocks, start + low, start + high, scores + low, spans, stride, rows, kind);
        for (int64_t row = 0; row < rows; row++) merge(states + row * stride, spans + row * stride, stride);
    }
    if (item->partial >= 0) {
        float *to = (float *)call->program->scratch + (item->partial * l->num_kv_heads + head * rows) * stride;
        memcpy(to, states, 4 * rows * stride);
        return;
    }
    for (int64_t row = 0; row < rows; row++)
        finish(call, token + row / group, head * group + row % group, states + row * stride, stride);
}

static void attend_items(void *data, int64_t first, int64_t end) {
    const Call *call = data;
    int64_t num_heads = call->step->layout->num_kv_heads;
    for (int64_t i = first; i < end; i++) {
        const Item *item = call->step->items + i / num_heads;
        switch (call->step->layout->kind) {  // three copies of the loops, each for one kind of number
            case FLOAT32: attend(call, item, i % num_heads, FLOAT32); break;
            case BFLOAT16: attend(call, item, i % num_heads, BFLOAT16); break;
            default: attend(call, item, i % num_heads, FLOAT16);
        }
    }
}

// Items of the same rows follow each other, in the order of their spans.
static void merge_partials(void *data, int64_t first, int64_t end) {  // one item
    const Call *call = data;
    const Step *step = call->step;
    const Layout *l = step->layout;
    int64_t group = l->num_heads / l->num_kv_heads, stride = (l->value_size + 15) / 16 * 16 + 16;
    for (int64_t i = 0; i < step->num_items;) {
        const Item *item = step->items + i;
        int64_t next = i + 1;
        if (item->partial < 0) {
            i = next;
            continue;
        }
        while (next < step->num_items && step->items[next].seq == item->seq &&
               step->items[next].token == item->token && step->items[next].partial >= 0) next++;
        int64_t rows = item->num_tokens * group, token = step->starts[item->seq] + item->token;
        for (int64_t row = 0; row < rows * l->num_kv_heads; row++) {
            float *state = (float *)call->program->scratch + (item->partial * l->num_kv_heads + row) * stride;
            for (int64_t other = i + 1; other < next; other++)
                merge(state, (float *)call->program->scratch + (step->items[other].partial * l->num_kv_heads + row) * stride, stride);
            int64_t head = row / rows, of_head = row % rows;
            finish(call, token + of_head / group, head * group + of_head % group, state, stride);
        }
        i = next;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Phases, of which a program that is run asks the number of items

static int64_t count_writes(void *data) {
    Call *call = data;
    call->step = *call->steps;
    return call->key ? (call->step->num_tokens + WRITTEN - 1) / WRITTEN : 0;
}

static int64_t count_items(void *data) { return ((Call *)data)->step->num_items * ((Call *)data)->step->layout->num_kv_heads; }

static int64_t count_merges(void *data) {
    Call *call = data;
    const Layout *l = call->step->layout;
    if (!call->step->num_partials) return 0;
    reserve(call->program, 4 * call->step->num_partials * l->num_kv_heads * ((l->value_size + 15) / 16 * 16 + 16));
    return call->program->has_failed ? -1 : 1;
}

enum { COST = 16, WRITE_COST = 256 };  // of a multiplication; of a number that is written

// Writes key and value unless they are NULL, and attends. program: where the call is recorded, for the steps that will
// be in *steps whenever it runs; NULL: it is run. Returns 0, or -1 without memory.
int attention(const Step *const *steps, const uint8_t *query, int64_t query_stride, const uint8_t *key,
              int64_t key_stride, const uint8_t *value, int64_t value_stride, uint8_t *keys, uint8_t *values,
              uint8_t *out, const float *sinks, float scale, float softcap, Program *program, Parallel parallel,
              int32_t num_threads) {
    Program own = {0}, *to = program ? program : &own;
    const Step *step = *steps;
    const Layout *l = step->layout;
    Call *call = add_call(to, sizeof *call);
    if (call) {
        *call = (Call){steps, step, query, key, value, query_stride, key_stride, value_stride, keys, values, out, sinks, scale, softcap, to};
        int64_t written = step->num_tokens * l->num_kv_heads * (l->head_size + l->value_size);
        add_phase(to, (Phase){write_turns, count_writes, call, 0, 1, WRITE_COST * written});
        add_phase(to, (Phase){attend_items, count_items, call, 0, 1, COST * step->num_operations});
        add_phase(to, (Phase){merge_partials, count_merges, call, 0, 1});
    }
    return record_or_run(program, &own, parallel, num_threads);
}
