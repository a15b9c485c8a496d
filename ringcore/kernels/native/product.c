// x W^T + b by weights in the blocks of a GGUF file, with the norm before it and the gate or the sum after it.

#include <math.h>
#include <stdlib.h>

#include "threads.h"
#include "tiles.h"

enum { STORE, ADD, SILU };  // what becomes of the products
enum { MOST_ROWS = 64 };    // that are multiplied at a time: packed, they stay in a core's cache

typedef struct {
    const uint8_t *weight;  // interleaved by 16 rows; the rows after the last whole run as in the file
    int64_t num_outputs, num_inputs, row_bytes;
    const float *bias;  // or NULL
    int32_t kind, is_rounded;
} Matrix;

typedef struct {
    const Matrix *matrix;
    const float *x, *gain;  // [num_rows, num_inputs] of x_stride; NULL: no norm
    float *y;               // [num_rows, num_outputs], of SILU half as many, of y_stride
    int64_t x_stride, y_stride, num_rows;
    float eps;
    int32_t epilogue;
    uint8_t *packed;
    atomic_long next_tile, next_run;
} Call;

INLINE int64_t tile_at(int64_t row, int64_t num_rows) {  // rows of the tile that starts there
    int64_t left = num_rows - row, rows = TILE;
    while (rows > left) rows /= 2;
    return rows;
}

INLINE int64_t row_words(const Matrix *matrix) {
    return matrix->is_rounded ? matrix->num_inputs / GROUP * WORDS : matrix->num_inputs / GROUP * (GROUP + 2);
}

// Two vectors of one row to the nearest of 255 equidistant numbers, the largest of them and 0 among those.
static void round_group(const float *x, int R, int32_t *out) {
    int32_t bits[GROUP], largest = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; i++) largest = (bits[i] & 0x7fffffff) > largest ? bits[i] & 0x7fffffff : largest;
    float most, *of_row = (float *)out + 8 * R;
    memcpy(&most, &largest, 4);
    float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0, sums[2];
    for (int half = 0; half < 2; half++) {
        // Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
        i32x16 codes = (i32x16)(floats_of(x + LANES * half) * inverse + splat(12582912.0f)) - 0x4b400000;
        int32_t words[4], sum = 0;
        i8x16 bytes = bytes_of(codes);
        memcpy(words, &bytes, 16);
        for (int i = 0; i < 4; i++) out[(4 * half + i) * R] = words[i];
        for (int i = 0; i < LANES; i++) sum += codes[i];
        sums[half] = scale * (float)sum;
    }
    of_row[0] = scale;
    of_row[R] = sums[0];
    of_row[2 * R] = sums[1];
    of_row[3 * R] = sums[0] + sums[1];
}

static void pack_row(const Call *call, const float *x, int R, float *out) {
    int64_t n = call->matrix->num_inputs;
    float factor = 1, values[GROUP];
    if (call->gain) {
        f32x16 squares = {};
        for (int64_t i = 0; i < n; i += LANES) squares = fma16(floats_of(x + i), floats_of(x + i), squares);
        float total = 0;
        for (int i = 0; i < LANES; i++) total += squares[i];
        factor = 1.0f / sqrtf(total / (float)n + call->eps);
    }
    for (int64_t first = 0; first < n; first += GROUP) {
        const float *from = x + first;
        if (call->gain) {
            for (int i = 0; i < GROUP; i++) values[i] = x[first + i] * factor * call->gain[first + i];
            from = values;
        }
        if (call->matrix->is_rounded) round_group(from, R, (int32_t *)out + first / GROUP * WORDS * R);
        else for (int i = 0; i < GROUP; i++) out[(first + i) * R] = from[i];
    }
    if (call->num_rows == 1 && !call->matrix->is_rounded)
        for (int64_t i = 0; i < n / 16; i++) {
            out[n + i] = 0;
            for (int j = 0; j < 16; j++) out[n + i] += out[16 * i + j];
        }
}

#define OF_KINDS(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_NL)

typedef f32x16 (*RowProduct)(const uint8_t *, int64_t, const float *);
typedef void (*Unpack)(const uint8_t *, int64_t, int, Chunk *);
#define FUNCTIONS(K)                                                                                                  \
    static f32x16 float_row_##K(const uint8_t *w, int64_t n, const float *x) { return row_product(K, 0, w, n, x); }   \
    static f32x16 rounded_row_##K(const uint8_t *w, int64_t n, const float *x) { return row_product(K, 1, w, n, x); } \
    static void expand_##K(const uint8_t *w, int64_t f, int n, Chunk *c) { unpack_chunk(K, w, f, n, 0, c); }          \
    static void unpack_##K(const uint8_t *w, int64_t f, int n, Chunk *c) { unpack_chunk(K, w, f, n, 1, c); }
OF_KINDS(FUNCTIONS)
#define ROWS(K) [K] = {float_row_##K, rounded_row_##K},
#define UNPACKS(K) [K] = {expand_##K, unpack_##K},
static const RowProduct ROW_PRODUCTS[][2] = {OF_KINDS(ROWS)};
static const Unpack UNPACK_CHUNK[][2] = {OF_KINDS(UNPACKS)};

static void tile(int R, const Matrix *matrix, const Chunk *chunk, int num_groups, const float *x, float *sums) {
#define TILE_OF(N)                                                                                             \
    case N:                                                                                                    \
        if (!matrix->is_rounded) float_tile(N, chunk, num_groups, x, sums);                                    \
        else if (matrix->kind == Q6_K) rounded_tile(N, 1, chunk, num_groups, (const int32_t *)x, sums);        \
        else rounded_tile(N, 0, chunk, num_groups, (const int32_t *)x, sums);                                  \
        return;
    switch (R) {
        TILE_OF(1) TILE_OF(2) TILE_OF(4) TILE_OF(8) TILE_OF(16)
    }
}

// sums [num_rows][16] of the run of 16 outputs at `run`.
static void run_product(const Call *call, const uint8_t *run, float *sums) {
    const Matrix *matrix = call->matrix;
    int64_t num_groups = matrix->num_inputs / GROUP, words = row_words(matrix), group_words = matrix->is_rounded ? WORDS : GROUP;
    const float *packed = (const float *)call->packed;
    if (call->num_rows == 1) {
        f32x16 sum = ROW_PRODUCTS[matrix->kind][matrix->is_rounded](run, num_groups, packed);
        memcpy(sums, &sum, 64);
        return;
    }
    Chunk chunk;
    memset(sums, 0, 64 * call->num_rows);
    for (int64_t first = 0; first < num_groups; first += CHUNK / GROUP) {
        int n = (int)(num_groups - first < CHUNK / GROUP ? num_groups - first : CHUNK / GROUP);
        UNPACK_CHUNK[matrix->kind][matrix->is_rounded](run, first, n, &chunk);
        prefetch(run + (first + n) * GROUP / LAYOUTS[matrix->kind].inputs * LANES * LAYOUTS[matrix->kind].bytes,
                 LANES * CHUNK / LAYOUTS[matrix->kind].inputs * LAYOUTS[matrix->kind].bytes);
        for (int64_t row = 0, rows; row < call->num_rows; row += rows) {
            rows = tile_at(row, call->num_rows);
            tile((int)rows, matrix, &chunk, n, packed + row * words + first * group_words * rows, sums + LANES * row);
        }
    }
}

// The run of 16 outputs from `first`; fewer are interleaved in `scratch`.
static const uint8_t *run_at(const Matrix *matrix, int64_t first, uint8_t *scratch) {
    const uint8_t *run = matrix->weight + first * matrix->row_bytes;
    int64_t left = matrix->num_outputs - first;
    if (left >= LANES) return run;
    memset(scratch, 0, LANES * matrix->row_bytes);
    interleave(matrix->kind, run, (int)left, matrix->row_bytes, scratch);
    return scratch;
}

static void add_bias(const Call *call, int64_t first, int64_t n, float *sums) {
    if (call->matrix->bias)
        for (int64_t row = 0; row < call->num_rows; row++)
            for (int64_t i = 0; i < n; i++) sums[LANES * row + i] += call->matrix->bias[first + i];
}

static void one_run(const Call *call, int64_t first, float *sums, uint8_t *scratch) {
    const Matrix *matrix = call->matrix;
    int64_t size = call->epilogue == SILU ? matrix->num_outputs / 2 : matrix->num_outputs;
    int64_t n = size - first < LANES ? size - first : LANES;
    run_product(call, run_at(matrix, first, scratch), sums);
    add_bias(call, first, n, sums);
    if (call->epilogue == SILU) {
        float *up = sums + LANES * call->num_rows;
        run_product(call, run_at(matrix, size + first, scratch), up);
        add_bias(call, size + first, n, up);
        for (int64_t row = 0; row < call->num_rows; row++) {
            f32x16 gate = floats_of(sums + LANES * row);
            gate = gate / (1.0f + exp16(-gate)) * floats_of(up + LANES * row);
            memcpy(sums + LANES * row, &gate, 64);
        }
    }
    for (int64_t row = 0; row < call->num_rows; row++) {
        float *y = call->y + row * call->y_stride + first;
        const float *sum = sums + LANES * row;
        if (call->epilogue == ADD) for (int64_t i = 0; i < n; i++) y[i] += sum[i];
        else memcpy(y, sum, 4 * n);
    }
}

static void pack_tiles(void *data) {  // what each thread does first
    Call *call = data;
    long index = atomic_fetch_add(&call->next_tile, 1), seen = 0;
    for (int64_t row = 0, rows; row < call->num_rows; row += rows, seen++) {
        rows = tile_at(row, call->num_rows);
        if (seen != index) continue;
        float *out = (float *)call->packed + row * row_words(call->matrix);
        for (int64_t r = 0; r < rows; r++) pack_row(call, call->x + (row + r) * call->x_stride, (int)rows, out + r);
        index = atomic_fetch_add(&call->next_tile, 1);
    }
}

static void multiply_runs(void *data) {  // and then
    Call *call = data;
    const Matrix *matrix = call->matrix;
    int64_t size = call->epilogue == SILU ? matrix->num_outputs / 2 : matrix->num_outputs;
    int64_t num_runs = (size + LANES - 1) / LANES;
    float *sums = aligned_alloc(64, 2 * 64 * call->num_rows);
    uint8_t *scratch = aligned_alloc(64, (LANES * matrix->row_bytes + 63) / 64 * 64);
    for (long run; (run = atomic_fetch_add(&call->next_run, 1)) < num_runs;) one_run(call, LANES * run, sums, scratch);
    free(sums);
    free(scratch);
}

// Waking a thread that sleeps takes about as long as one thread needs for this many (outputs x inputs) x (rows + 3).
enum { ALONE = 8 << 20 };

// y = or += the products. Returns 0, or -1 without memory.
int blocks_product(const Matrix *matrix, const float *x, int64_t x_stride, int64_t num_rows, const float *gain, float eps,
                   float *y, int64_t y_stride, int32_t epilogue, Parallel parallel, int32_t num_threads) {
    if (matrix->num_outputs * matrix->num_inputs * (num_rows + 3) < ALONE) num_threads = 1;
    int64_t most = num_rows < MOST_ROWS ? num_rows : MOST_ROWS;
    uint8_t *packed = aligned_alloc(64, (4 * most * row_words(matrix) + 63) / 64 * 64);
    if (!packed) return -1;
    for (int64_t row = 0; row < num_rows; row += MOST_ROWS, x += MOST_ROWS * x_stride, y += MOST_ROWS * y_stride) {
        int64_t rows = num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS;
        Call call = {matrix, x, gain, y, x_stride, y_stride, rows, eps, epilogue, packed, 0, 0};
        run_threads(pack_tiles, &call, parallel, rows > TILE ? num_threads : 1);
        run_threads(multiply_runs, &call, parallel, num_threads);
    }
    free(packed);
    return 0;
}

// 16 rows at a time, in place; the rows after the last 16 stay as they are. Returns 0, or -1 without memory.
int blocks_arrange(int32_t kind, uint8_t *weight, int64_t num_outputs, int64_t row_bytes, int32_t restore) {
    uint8_t *copy = malloc(LANES * row_bytes);
    if (!copy) return -1;
    for (int64_t first = 0; first + LANES <= num_outputs; first += LANES) {
        uint8_t *run = weight + first * row_bytes;
        memcpy(copy, run, LANES * row_bytes);
        if (restore) deinterleave(kind, copy, row_bytes, run);
        else interleave(kind, copy, LANES, row_bytes, run);
    }
    free(copy);
    return 0;
}

// Rows `index` of the matrix as numbers: out [n, num_inputs].
int blocks_rows(const Matrix *matrix, const int64_t *index, int64_t n, float *out) {
    Chunk chunk;
    uint8_t *scratch = malloc(LANES * matrix->row_bytes);
    if (!scratch) return -1;
    int64_t num_groups = matrix->num_inputs / GROUP;
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *run = run_at(matrix, index[i] / LANES * LANES, scratch);
        for (int64_t first = 0; first < num_groups; first += CHUNK / GROUP) {
            int left = (int)(num_groups - first < CHUNK / GROUP ? num_groups - first : CHUNK / GROUP);
            UNPACK_CHUNK[matrix->kind][0](run, first, left, &chunk);
            float *to = out + i * matrix->num_inputs + GROUP * first;
            for (int j = 0; j < GROUP * left; j++) to[j] = chunk.weights[j][index[i] % LANES];
        }
    }
    free(scratch);
    return 0;
}
