// x W^T + b by weights in the blocks of a GGUF file, with the norm before it and the gate or the sum after it.

#include <math.h>
#include <stdlib.h>

#include "threads.h"
#include "tiles.h"

enum { STORE, ADD, SILU };  // what becomes of the products
enum { MOST_ROWS = 64 };    // that are multiplied at a time: packed, they stay in a core's cache

typedef struct {
    const uint8_t *weight;  // interleaved by 16 rows; the rows after the last whole run as in the file
    int64_t num_outputs, num_inputs, row_bytes;  // of a row there may be more than its blocks
    const float *bias;     // or NULL
    const float *scales;   // [runs][scales of an output][16], where blocks have none
    const uint8_t *zeros;  // likewise; of E2M1, which has no `scales`, the exponents
    int64_t run_scales;    // numbers of these of a run
    int32_t kind, form, shift, least_zero;
} Matrix;

typedef struct {
    const Matrix *matrix;
    const uint8_t *x;   // [num_rows, num_inputs] of x_stride, of x_kind
    const float *gain;  // NULL: no norm
    uint8_t *y;         // [num_rows, num_outputs], of SILU half as many, of y_stride, of y_kind; of ADD float32
    int64_t x_stride, y_stride, num_rows;
    float eps;
    int32_t epilogue, form, x_kind, y_kind;
    Program *program;   // its scratch has the packed rows
    int64_t packed_at;  // from which byte on
    uint8_t *last_run;  // the last outputs, if fewer than 16, are interleaved here
} Call;

INLINE float *packed_rows(const Call *call) { return (float *)(call->program->scratch + call->packed_at); }

INLINE int64_t tile_at(int64_t row, int64_t num_rows) {  // rows of the tile that starts there
    int64_t left = num_rows - row, rows = TILE;
    while (rows > left) rows /= 2;
    return rows;
}

INLINE int64_t group_words(int32_t form) {
    return form == ROUNDED ? WORDS : form == PAIRS ? PAIR_WORDS : form == INTEGERS ? GROUP / 4 : GROUP;
}

INLINE int64_t row_words(const Matrix *matrix, int32_t form) {  // of floats and integers two words more
    return matrix->num_inputs / GROUP * (group_words(form) + (form == FLOATS ? 2 : 0)) + (form == INTEGERS ? 2 : 0);
}

// Two vectors of one row to the nearest of 255 equidistant numbers, the largest of them and 0 among those.
static void round_group(const float *x, int kind, int R, int32_t *out) {
    int32_t bits[GROUP], largest = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; i++) largest = (bits[i] & 0x7fffffff) > largest ? bits[i] & 0x7fffffff : largest;
    float most, *of_row = (float *)out + 8 * R;
    memcpy(&most, &largest, 4);
    float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0;
    int32_t sums[3];
    for (int half = 0; half < 2; half++) {
        // Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
        i32x16 codes = (i32x16)(floats_of(x + LANES * half) * inverse + splat(12582912.0f)) - 0x4b400000;
        int32_t words[4];
        i8x16 bytes = bytes_of(codes);
        memcpy(words, &bytes, 16);
        for (int i = 0; i < 4; i++) out[(4 * half + i) * R] = words[i];
        sums[half] = sum_words(codes);
    }
    of_row[0] = scale;
    sums[2] = sums[0] + sums[1];
    for (int i = 0; i < 3; i++) {
        if (has_minima(kind)) of_row[(1 + i) * R] = scale * (float)sums[i];
        else out[(9 + i) * R] = -zero_of(kind) * sums[i];
    }
}

static void pair_group_of_row(const float *x, int R, float *out) {
    uint32_t bits[GROUP];
    float sum = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; i++) sum += x[i];
    for (int i = 0; i < GROUP / 2; i++) ((uint32_t *)out)[i * R] = bits[2 * i] >> 16 | (bits[2 * i + 1] & 0xffff0000);
    out[16 * R] = sum;
}

// A group of inputs of a row, normalised where there is a gain.
INLINE void inputs_at(const Call *call, const uint8_t *x, int64_t first, float factor, float *values) {
    for (int i = 0; i < GROUP; i += LANES) {
        f32x16 x16 = load16(x + (first + i) * bytes_of_number(call->x_kind), call->x_kind);
        if (call->gain) x16 = x16 * factor * floats_of(call->gain + first + i);
        memcpy(values + i, &x16, 64);
    }
}

// A row to the nearest of 255 equidistant numbers, the largest of it and 0 among those.
static void round_row(const Call *call, const uint8_t *x, float factor, int R, int32_t *out) {
    int64_t n = call->matrix->num_inputs;
    float values[GROUP], largest = 0;
    for (int64_t first = 0; first < n; first += GROUP) {
        inputs_at(call, x, first, factor, values);
        for (int i = 0; i < GROUP; i++) largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
    }
    float scale = largest / 127.0f;
    scale = scale > 1e-12f ? scale : 1e-12f;
    int32_t sum = 0;
    for (int64_t first = 0; first < n; first += GROUP) {
        inputs_at(call, x, first, factor, values);
        for (int half = 0; half < 2; half++) {
            i32x16 codes = (i32x16)(floats_of(values + LANES * half) / scale + splat(12582912.0f)) - 0x4b400000;
            int32_t words[4];
            i8x16 bytes = bytes_of(codes);
            memcpy(words, &bytes, 16);
            for (int i = 0; i < 4; i++) out[(first / 4 + 4 * half + i) * R] = words[i];
            sum += sum_words(codes);
        }
    }
    out[n / 4 * R] = sum;
    ((float *)out)[(n / 4 + 1) * R] = scale;
}

static void pack_row(const Call *call, const uint8_t *x, int R, float *out) {
    int64_t n = call->matrix->num_inputs;
    float factor = 1, values[GROUP];
    if (call->gain) {
        f32x16 squares = {};
        for (int64_t i = 0; i < n; i += LANES) {
            f32x16 x16 = load16(x + i * bytes_of_number(call->x_kind), call->x_kind);
            squares = fma16(x16, x16, squares);
        }
        float total = 0;
        for (int i = 0; i < LANES; i++) total += squares[i];
        factor = 1.0f / sqrtf(total / (float)n + call->eps);
    }
    if (call->form == INTEGERS) {
        round_row(call, x, factor, R, (int32_t *)out);
        return;
    }
    for (int64_t first = 0; first < n; first += GROUP) {
        float *of_group = out + first / GROUP * group_words(call->form) * R;
        inputs_at(call, x, first, factor, values);
        if (call->form == ROUNDED) round_group(values, call->matrix->kind, R, (int32_t *)of_group);
        else if (call->form == PAIRS) pair_group_of_row(values, R, of_group);
        else for (int i = 0; i < GROUP; i++) of_group[i * R] = values[i];
    }
    if (call->num_rows == 1 && call->form == FLOATS)
        for (int64_t i = 0; i < n / 16; i++) {
            out[n + i] = 0;
            for (int j = 0; j < 16; j++) out[n + i] += out[16 * i + j];
        }
}

#define OF_FILES(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_NL)
#define OF_KINDS(DO) OF_FILES(DO) DO(NIBBLES) DO(BYTES) DO(E4M3) DO(E2M1)

typedef f32x16 (*RowProduct)(const Run *, int64_t, const float *);
typedef void (*Rounded)(int, const Run *, int64_t, const int32_t *, float *);
typedef void (*FewRows)(int, const Run *, int64_t, const float *, float *);
typedef void (*Unpack)(const Run *, int64_t, int, Chunk *);
#define FUNCTIONS(K)                                                                                            \
    static f32x16 float_row_##K(const Run *run, int64_t n, const float *x) { return row_product(K, run, n, x); } \
    static void expand_##K(const Run *run, int64_t f, int n, Chunk *c) { unpack_chunk(K, run, f, n, FLOATS, c); } \
    static void pairs_##K(const Run *run, int64_t f, int n, Chunk *c) { unpack_chunk(K, run, f, n, PAIRS, c); }
#define FEW_FUNCTION(K)                                                                         \
    static void few_##K(int R, const Run *run, int64_t n, const float *x, float *sums) {        \
        switch (R) {                                                                            \
            case 1: float_rows(K, 1, run, n, x, sums); return;                                  \
            case 2: float_rows(K, 2, run, n, x, sums); return;                                  \
            case 4: float_rows(K, 4, run, n, x, sums); return;                                  \
        }                                                                                       \
    }
#if defined(__AVX512F__)
#define ROUNDED_TILE(K) case 8: rounded_rows(K, 8, run, n, x, sums); return;
#else
#define ROUNDED_TILE(K)
#endif
#define ROUNDED_FUNCTION(K)                                                                         \
    static void rounded_##K(int R, const Run *run, int64_t n, const int32_t *x, float *sums) {      \
        switch (R) {                                                                                \
            case 1: rounded_rows(K, 1, run, n, x, sums); return;                                    \
            case 2: rounded_rows(K, 2, run, n, x, sums); return;                                    \
            case 4: rounded_rows(K, 4, run, n, x, sums); return;                                    \
            ROUNDED_TILE(K)                                                                         \
        }                                                                                           \
    }
OF_KINDS(FUNCTIONS)
OF_KINDS(FEW_FUNCTION)
OF_FILES(ROUNDED_FUNCTION)
static f32x16 pair_row_NIBBLES(const Run *run, int64_t n, const float *x) { return pair_row(NIBBLES, run, n, (const uint32_t *)x); }
#define FLOAT_ROW(K) [K] = float_row_##K,
#define FEW_OF(K) [K] = few_##K,
#define ROUNDED_OF(K) [K] = rounded_##K,
#define EXPAND(K) [K] = expand_##K,
#define PAIR(K) [K] = pairs_##K,
static const RowProduct ROW_PRODUCTS[][E2M1 + 1] = {[FLOATS] = {OF_KINDS(FLOAT_ROW)}, [PAIRS] = {[NIBBLES] = pair_row_NIBBLES}};
static const Rounded ROUNDED_PRODUCTS[] = {OF_FILES(ROUNDED_OF)};
static const FewRows FEW_ROWS[] = {OF_KINDS(FEW_OF)};
static const Unpack UNPACK_CHUNK[][E2M1 + 1] = {[FLOATS] = {OF_KINDS(EXPAND)}, [PAIRS] = {OF_KINDS(PAIR)}};

static void tile(int R, int S, const Call *call, const Chunk *chunks, int num_groups, const float *x, float *sums) {
    int kind = call->matrix->kind, pair_minima = has_minima(kind) || kind == NIBBLES;
    int64_t stride = LANES * call->num_rows;
    const uint32_t *pairs = (const uint32_t *)x;
#define TILE_OF(N, S)                                                                                    \
    case 2 * N + S:                                                                                      \
        if (call->form == FLOATS) float_tile(N, S, chunks, num_groups, x, sums, stride);                 \
        else if (kind == Q6_K) pair_tile(N, S, 1, 0, chunks, num_groups, pairs, sums, stride);           \
        else pair_tile(N, S, 0, pair_minima, chunks, num_groups, pairs, sums, stride);                   \
        return;
    switch (2 * R + S) {
        TILE_OF(1, 1) TILE_OF(1, 2) TILE_OF(2, 1) TILE_OF(2, 2) TILE_OF(4, 1) TILE_OF(4, 2)
#if defined(__AVX512F__)
        TILE_OF(8, 1) TILE_OF(8, 2)
#endif
    }
}

static void integers(int R, int S, const Call *call, const Run *runs, const int32_t *x, float *sums) {
    int64_t num_groups = call->matrix->num_inputs / GROUP, stride = LANES * call->num_rows;
#define INTEGERS_OF(N, S) \
    case 2 * N + S: integer_tile(N, S, runs, num_groups, x, sums, stride); return;
    switch (2 * R + S) {
        INTEGERS_OF(1, 1) INTEGERS_OF(1, 2) INTEGERS_OF(2, 1) INTEGERS_OF(2, 2) INTEGERS_OF(4, 1) INTEGERS_OF(4, 2)
#if defined(__AVX512F__)
        INTEGERS_OF(8, 1) INTEGERS_OF(8, 2)
#endif
    }
}

// Of more rows than one, chunk by chunk. Not inlined: what has no use for the chunks shall not pay for their memory.
static __attribute__((noinline)) void chunks_product(const Call *call, int S, const Run *runs, float *sums) {
    const Matrix *matrix = call->matrix;
    int64_t num_groups = matrix->num_inputs / GROUP, words = row_words(matrix, call->form);
    const float *packed = packed_rows(call);
    Chunk chunks[2];
    int64_t per_block = LAYOUTS[matrix->kind].inputs / GROUP, run_bytes = LANES * LAYOUTS[matrix->kind].bytes;
    memset(sums, 0, 64 * call->num_rows * S);
    for (int64_t first = 0; first < num_groups; first += CHUNK / GROUP) {
        int n = (int)(num_groups - first < CHUNK / GROUP ? num_groups - first : CHUNK / GROUP);
        for (int s = 0; s < S; s++) {
            UNPACK_CHUNK[call->form][matrix->kind](&runs[s], first, n, &chunks[s]);
            prefetch(runs[s].blocks + (first + n) / per_block * run_bytes, (CHUNK / GROUP + per_block - 1) / per_block * run_bytes);
        }
        for (int64_t row = 0, rows; row < call->num_rows; row += rows) {
            rows = tile_at(row, call->num_rows);
            const float *x = packed + row * words + first * group_words(call->form) * rows;
            tile((int)rows, S, call, chunks, n, x, sums + LANES * row);
        }
    }
}

// sums [S][num_rows][16] of S runs.
static void run_product(const Call *call, int S, const Run *runs, float *sums) {
    const Matrix *matrix = call->matrix;
    int64_t num_groups = matrix->num_inputs / GROUP, words = row_words(matrix, call->form);
    const float *packed = packed_rows(call);
    if (call->num_rows == 1 && (call->form == FLOATS || call->form == PAIRS)) {
        f32x16 sum = ROW_PRODUCTS[call->form][matrix->kind](runs, num_groups, packed);
        memcpy(sums, &sum, 64);
        return;
    }
    if (call->form == ROUNDED || call->form == INTEGERS) {
        for (int64_t row = 0, rows; row < call->num_rows; row += rows) {
            rows = tile_at(row, call->num_rows);
            const int32_t *x = (const int32_t *)packed + row * words;
            if (call->form == INTEGERS) integers((int)rows, S, call, runs, x, sums + LANES * row);
            else ROUNDED_PRODUCTS[matrix->kind]((int)rows, runs, num_groups, x, sums + LANES * row);
        }
        return;
    }
    if (TILE > FEW && call->form == FLOATS && call->num_rows <= FEW) {
        for (int64_t row = 0, rows; row < call->num_rows; row += rows) {
            rows = tile_at(row, call->num_rows);
            FEW_ROWS[matrix->kind]((int)rows, runs, num_groups, packed + row * words, sums + LANES * row);
        }
        return;
    }
    chunks_product(call, S, runs, sums);
}

// The run of 16 outputs from `first`; fewer are interleaved in `scratch`.
static Run run_at(const Matrix *matrix, int64_t first, uint8_t *scratch) {
    Run run = {matrix->weight + first * matrix->row_bytes, NULL, NULL, matrix->shift, matrix->least_zero};
    int64_t scale = first / LANES * matrix->run_scales;
    if (matrix->scales) run.scales = matrix->scales + scale;
    if (matrix->zeros) run.zeros = matrix->zeros + scale;
    int64_t left = matrix->num_outputs - first;
    if (left >= LANES) return run;
    memset(scratch, 0, LANES * matrix->row_bytes);
    int64_t num_bytes = matrix->num_inputs / LAYOUTS[matrix->kind].inputs * LAYOUTS[matrix->kind].bytes;
    interleave(matrix->kind, (uint8_t *)run.blocks, (int)left, matrix->row_bytes, num_bytes, scratch, 0);
    run.blocks = scratch;
    return run;
}

static void finish(const Call *call, int64_t first, float *sums) {  // one run
    int64_t size = call->epilogue == SILU ? call->matrix->num_outputs / 2 : call->matrix->num_outputs;
    int64_t n = size - first < LANES ? size - first : LANES;
    for (int64_t row = 0; row < call->num_rows; row++) {
        uint8_t *y = call->y + (row * call->y_stride + first) * bytes_of_number(call->y_kind);
        const float *sum = sums + LANES * row;
        if (call->epilogue == ADD) for (int64_t i = 0; i < n; i++) ((float *)y)[i] += sum[i];
        else store_up_to(y, floats_of(sum), n, call->y_kind);
    }
}

// Two runs: neighbours, or those of gate and up. Of the last one there may be no second.
static void two_runs(Call *call, int64_t index, float *sums) {
    const Matrix *matrix = call->matrix;
    int64_t size = matrix->num_outputs, first[2] = {2 * LANES * index, 2 * LANES * index + LANES};
    if (call->epilogue == SILU) first[0] = LANES * index, first[1] = size / 2 + LANES * index;
    int S = first[1] < size ? 2 : 1;
    Run runs[2];
    for (int s = 0; s < S; s++) runs[s] = run_at(matrix, first[s], call->last_run);
    float *second = sums + LANES * call->num_rows;
    if (call->num_rows >= TILE && call->form != ROUNDED) run_product(call, S, runs, sums);
    else for (int s = 0; s < S; s++) run_product(call, 1, &runs[s], s ? second : sums);
    for (int s = 0; s < S && matrix->bias; s++)
        for (int64_t row = 0; row < call->num_rows; row++)
            for (int64_t i = 0; i < LANES && first[s] + i < size; i++)
                (s ? second : sums)[LANES * row + i] += matrix->bias[first[s] + i];
    if (call->epilogue == SILU)
        for (int64_t row = 0; row < call->num_rows; row++) {
            f32x16 gate = floats_of(sums + LANES * row);
            gate = gate / (1.0f + exp16(-gate)) * floats_of(second + LANES * row);
            memcpy(sums + LANES * row, &gate, 64);
        }
    finish(call, first[0], sums);
    if (S == 2 && call->epilogue != SILU) finish(call, first[1], second);
}

static void pack_rows(void *data, int64_t first, int64_t end) {  // the first phase
    const Call *call = data;
    int64_t row_bytes = call->x_stride * bytes_of_number(call->x_kind);
    for (int64_t row = 0, rows; row < end; row += rows) {
        rows = tile_at(row, call->num_rows);
        float *out = packed_rows(call) + row * row_words(call->matrix, call->form);
        for (int64_t r = first > row ? first - row : 0; r < rows && row + r < end; r++)
            pack_row(call, call->x + (row + r) * row_bytes, (int)rows, out + r);
    }
}

static void multiply_runs(void *data, int64_t first, int64_t end) {  // the second one
    Call *call = data;
    float sums[2 * LANES * MOST_ROWS] __attribute__((aligned(64)));
    for (; first < end; first++) two_runs(call, first, sums);
}

// Whether products of pairs are faster than those of float32 numbers.
int blocks_have_pairs(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Where a code becomes a bfloat16 number by way of float32, one row is multiplied by that.
INLINE int32_t form_of(const Matrix *matrix, int64_t num_rows) {
    return matrix->form == PAIRS && num_rows == 1 && matrix->kind != NIBBLES ? FLOATS : matrix->form;
}

// y = or += the products. program: where the call is recorded; NULL: it is run. Returns 0, or -1 without memory.
int blocks_product(const Matrix *matrix, const uint8_t *x, int32_t x_kind, int64_t x_stride, int64_t num_rows,
                   const float *gain, float eps, uint8_t *y, int32_t y_kind, int64_t y_stride, int32_t epilogue,
                   Program *program, Parallel parallel, int32_t num_threads) {
    Program own = {0}, *to = program ? program : &own;
    int32_t form = form_of(matrix, num_rows);
    int64_t runs = (matrix->num_outputs + 2 * LANES - 1) / (2 * LANES), left = matrix->num_outputs % LANES;
    for (int64_t row = 0; row < num_rows && !to->has_failed; row += MOST_ROWS) {
        int64_t rows = num_rows - row < MOST_ROWS ? num_rows - row : MOST_ROWS;
        const uint8_t *from = x + row * x_stride * bytes_of_number(x_kind);
        uint8_t *out = y + row * y_stride * bytes_of_number(y_kind);
        reserve(to, 4 * rows * row_words(matrix, form));
        Call *call = add_call(to, sizeof *call + (left ? LANES * matrix->row_bytes : 0));
        if (!call) break;
        *call = (Call){matrix, from, gain, out, x_stride, y_stride, rows, eps, epilogue, form, x_kind, y_kind, to,
                       0, (uint8_t *)(call + 1)};
        add_phase(to, (Phase){pack_rows, NULL, call, rows, TILE});
        add_phase(to, (Phase){multiply_runs, NULL, call, runs, 0, matrix->num_outputs * matrix->num_inputs * (rows + 3)});
    }
    return record_or_run(program, &own, parallel, num_threads);
}

// Rows of one expert, at most MOST_ROWS.
typedef struct {
    Matrix matrix;
    Call call;
    int64_t first_row;  // in its batch
} Block;

// Blocks whose rows are packed at once: MOST_PACKED of them.
typedef struct {
    Block *blocks;
    int64_t num_blocks, num_rows, pairs;  // of runs, of an expert
} Batch;
enum { MOST_PACKED = 8 * MOST_ROWS };

static void pack_blocks(void *data, int64_t first, int64_t end) {  // items: rows
    Batch *batch = data;
    for (Block *block = batch->blocks; block < batch->blocks + batch->num_blocks && block->first_row < end; block++) {
        int64_t from = first - block->first_row, to = end - block->first_row, rows = block->call.num_rows;
        if (from < rows) pack_rows(&block->call, from > 0 ? from : 0, to < rows ? to : rows);
    }
}

static void multiply_blocks(void *data, int64_t first, int64_t end) {  // items: two runs of a block
    Batch *batch = data;
    for (int64_t last; first < end; first = last) {
        int64_t start = first / batch->pairs * batch->pairs;
        last = start + batch->pairs < end ? start + batch->pairs : end;
        multiply_runs(&batch->blocks[start / batch->pairs].call, first - start, last - start);
    }
}

// Expert `index` of those whose outputs follow one another, in whole runs.
static Matrix of_expert(const Matrix *all, int64_t num_experts, int64_t index) {
    Matrix matrix = *all;
    matrix.num_outputs /= num_experts;
    int64_t first = index * matrix.num_outputs, scale = first / LANES * matrix.run_scales;
    matrix.weight += first * matrix.row_bytes;
    if (matrix.scales) matrix.scales += scale;
    if (matrix.zeros) matrix.zeros += scale;
    return matrix;
}

static void add_batch(Program *program, Batch *batch) {
    const Matrix *matrix = &batch->blocks->matrix;
    int64_t bytes = 0, cost = 0;
    for (Block *block = batch->blocks; block < batch->blocks + batch->num_blocks; block++) {
        block->call.packed_at = bytes;
        bytes += (4 * block->call.num_rows * row_words(matrix, block->call.form) + 63) / 64 * 64;
        cost += matrix->num_outputs * matrix->num_inputs * (block->call.num_rows + 3);
    }
    reserve(program, bytes);
    add_phase(program, (Phase){pack_blocks, NULL, batch, batch->num_rows, TILE});
    add_phase(program, (Phase){multiply_blocks, NULL, batch, batch->num_blocks * batch->pairs, 0, cost});
}

// y [num_rows, outputs of an expert] = the products of rows sorted by expert, those of expert e up to row ends[e].
// matrix: of all experts. Returns 0, or -1 without memory.
int blocks_experts(const Matrix *matrix, const int32_t *ends, int64_t num_experts, const uint8_t *x, int32_t x_kind,
                   int64_t x_stride, uint8_t *y, int32_t y_kind, int64_t y_stride, Parallel parallel, int32_t num_threads) {
    Program program = {0};
    int64_t row = 0, most = num_experts + (num_experts ? ends[num_experts - 1] / MOST_ROWS : 0);
    Block *blocks = add_call(&program, most * sizeof *blocks), *next = blocks;
    Batch *batches = add_call(&program, most * sizeof *batches), *batch = batches;
    if (!blocks || !batches) most = 0, num_experts = 0;
    else *batch = (Batch){blocks, 0, 0, (matrix->num_outputs / num_experts + 2 * LANES - 1) / (2 * LANES)};
    for (int64_t expert = 0; expert < num_experts; expert++)
        for (int64_t rows; row < ends[expert]; row += rows, next++) {
            rows = ends[expert] - row < MOST_ROWS ? ends[expert] - row : MOST_ROWS;
            if (batch->num_rows + rows > MOST_PACKED) {
                add_batch(&program, batch);
                batch[1] = (Batch){next, 0, 0, batch->pairs};
                batch++;
            }
            *next = (Block){of_expert(matrix, num_experts, expert), {0}, batch->num_rows};
            next->call = (Call){&next->matrix, x + row * x_stride * bytes_of_number(x_kind), NULL,
                                y + row * y_stride * bytes_of_number(y_kind), x_stride, y_stride, rows, 0, STORE,
                                form_of(matrix, rows), x_kind, y_kind, &program, 0, NULL};
            batch->num_blocks++, batch->num_rows += rows;
        }
    if (most && batch->num_blocks) add_batch(&program, batch);
    return record_or_run(NULL, &program, parallel, num_threads);
}

typedef struct {
    uint8_t *weight;
    int64_t num_outputs, row_bytes;
    int32_t kind, restore;
    atomic_long num_failed;
} Rearrangement;

static void arrange_runs(void *data, int64_t run, int64_t end) {
    Rearrangement *all = data;
    uint8_t *copy = malloc(LANES * all->row_bytes);
    if (!copy) {
        atomic_fetch_add(&all->num_failed, 1);
        return;
    }
    for (; run < end; run++) {
        uint8_t *rows = all->weight + LANES * run * all->row_bytes;
        memcpy(copy, rows, LANES * all->row_bytes);
        if (all->restore) interleave(all->kind, rows, LANES, all->row_bytes, all->row_bytes, copy, 1);
        else interleave(all->kind, copy, LANES, all->row_bytes, all->row_bytes, rows, 0);
    }
    free(copy);
}

// 16 rows at a time, in place; the rows after the last 16 stay as they are. Returns 0, or -1 without memory, in which
// case a part is arranged.
int blocks_arrange(int32_t kind, uint8_t *weight, int64_t num_outputs, int64_t row_bytes, int32_t restore,
                   Parallel parallel, int32_t num_threads) {
    Rearrangement all = {weight, num_outputs, row_bytes, kind, restore, 0};
    int status = run_phase((Phase){arrange_runs, NULL, &all, num_outputs / LANES, 0, num_outputs * row_bytes}, parallel, num_threads);
    return status || all.num_failed ? -1 : 0;
}

typedef struct {
    const uint8_t *codes;
    const int64_t *out_at, *in_at;
    int64_t num_outputs, num_inputs;
    int32_t bits;
    uint8_t *rows;
} Gathering;

INLINE uint8_t code_at(const Gathering *all, int64_t place) {
    return all->bits == 4 ? all->codes[place >> 1] >> 4 * (place & 1) & 15 : all->codes[place];
}

enum { TOGETHER = 64 };  // outputs: of a checkpoint's row of inputs they share a cache line

static void gather_outputs(void *data, int64_t turn, int64_t last) {
    const Gathering *all = data;
    int64_t group_bytes = all->bits == 4 ? GROUP / 2 : GROUP, row_bytes = all->num_inputs / GROUP * group_bytes;
    for (int64_t first = TOGETHER * turn; first < TOGETHER * last; first += TOGETHER)
        for (int64_t group = 0; group < all->num_inputs / GROUP; group++)
            for (int64_t o = first; o < first + TOGETHER && o < all->num_outputs; o++) {
                const int64_t *in_at = all->in_at + GROUP * group;
                uint8_t codes[GROUP], *to = all->rows + o * row_bytes + group * group_bytes;
                for (int i = 0; i < GROUP; i++) codes[i] = code_at(all, all->out_at[o] + in_at[i]);
                if (all->bits == 8) memcpy(to, codes, GROUP);
                else for (int i = 0; i < GROUP / 2; i++) {  // the order of NIBBLES
                    int input = (i & ~3) | (i & 1) << 1 | (i >> 1 & 1);
                    to[i] = codes[input] | codes[input + 16] << 4;
                }
            }
}

// Rows of blocks of NIBBLES or BYTES from a checkpoint's codes of 4 or 8 bits: that of output o and input i is number
// out_at[o] + in_at[i], of so many bits, from the lowest of `codes` on.
int blocks_gather(const uint8_t *codes, const int64_t *out_at, const int64_t *in_at, int64_t num_outputs,
                  int64_t num_inputs, int32_t bits, uint8_t *rows, Parallel parallel, int32_t num_threads) {
    Gathering all = {codes, out_at, in_at, num_outputs, num_inputs, bits, rows};
    int64_t turns = (num_outputs + TOGETHER - 1) / TOGETHER;
    return run_phase((Phase){gather_outputs, NULL, &all, turns, 1, num_outputs * num_inputs}, parallel, num_threads);
}

// Rows `index` of the matrix as numbers: out [n, num_inputs].
int blocks_rows(const Matrix *matrix, const int64_t *index, int64_t n, float *out) {
    Chunk chunk;
    uint8_t *scratch = malloc(LANES * matrix->row_bytes);
    if (!scratch) return -1;
    int64_t num_groups = matrix->num_inputs / GROUP;
    for (int64_t i = 0; i < n; i++) {
        Run run = run_at(matrix, index[i] / LANES * LANES, scratch);
        for (int64_t first = 0; first < num_groups; first += CHUNK / GROUP) {
            int left = (int)(num_groups - first < CHUNK / GROUP ? num_groups - first : CHUNK / GROUP);
            UNPACK_CHUNK[FLOATS][matrix->kind](&run, first, left, &chunk);
            float *to = out + i * matrix->num_inputs + GROUP * first;
            for (int j = 0; j < GROUP * left; j++) to[j] = chunk.weights[j][index[i] % LANES];
        }
    }
    free(scratch);
    return 0;
}
