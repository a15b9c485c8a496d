// What a decoder layer does to rows between its products, each in one pass: norms, rotations and gates.
//
// Every row is computed alone, in float32: the result does not depend on the rows beside it.

#include <math.h>
#include <stdlib.h>

#include "vectors.h"
#include "threads.h"

enum { NORM, ADD_NORM, GATE, ROTATE };

typedef struct {
    int32_t operation, kind, activation;
    uint8_t *x, *out;
    int64_t x_stride, out_stride, num_rows, size;
    const float *gain, *angles;
    float eps;
    int64_t num_heads, num_kv_heads;
} Rows;

static float sum16(f32x16 x) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

// x / sqrt(mean(x^2) + eps) * gain of n numbers. The kinds of x and out may differ; or float32 numbers of out += it, as
// it is in kind `to`.
INLINE void norm_row(const uint8_t *x, int32_t kind, int64_t n, const float *gain, float eps, uint8_t *out, int32_t to, int adds) {
    f32x16 squares[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (int64_t i = 0, j = 0; i < n; i += 16, j++) {
        f32x16 v = load_up_to(x + i * bytes_of_number(kind), n - i, kind);
        squares[j & 3] = fma16(v, v, squares[j & 3]);
    }
    float scale = 1.0f / sqrtf(sum16((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)n + eps);
    for (int64_t i = 0; i < n; i += 16) {
        f32x16 v = scale * load_up_to(x + i * bytes_of_number(kind), n - i, kind);
        v *= load_up_to((const uint8_t *)(gain + i), n - i, FLOAT32);
        if (adds) {
            uint8_t rounded[64];
            store16(rounded, v, to);
            v = load_up_to(out + 4 * i, n - i, FLOAT32) + load16(rounded, to);
            store_up_to(out + 4 * i, v, n - i, FLOAT32);
        } else {
            store_up_to(out + i * bytes_of_number(to), v, n - i, to);
        }
    }
}

enum { SILU, GELU_TANH };

INLINE void gate_row(const uint8_t *x, int64_t n, int32_t activation, uint8_t *out, int32_t kind) {
    int64_t width = bytes_of_number(kind);
    for (int64_t i = 0; i < n; i += 16) {
        f32x16 gate = load_up_to(x + i * width, n - i, kind), up = load_up_to(x + (n + i) * width, n - i, kind);
        // gelu with tanh: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
        f32x16 z = activation == SILU ? gate : gate * (1.5957691216f + 0.07135481283f * (gate * gate));
        store_up_to(out + i * width, gate / (1.0f + exp16(-z)) * up, n - i, kind);
    }
}

// Heads of q and k of a token, each normalised if there is a gain, and rotated: pairs (2i, 2i + 1) by angles (cos, sin).
INLINE void rotate_row(const Rows *call, int64_t row, const int32_t kind) {
    const i32x16 swapped = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const i32x16 even = {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
    const i32x16 odd = {1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15};
    const f32x16 sign = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    int64_t n = call->size, width = bytes_of_number(kind);
    const float *angles = call->angles + row * n;
    for (int64_t head = 0; head < call->num_heads + call->num_kv_heads; head++) {
        uint8_t *x = call->x + (row * call->x_stride + head * n) * width;
        if (call->gain) {
            const float *gain = call->gain + (head < call->num_heads ? 0 : n);
            norm_row(x, kind, n, gain, call->eps, x, kind, 0);
        }
        for (int64_t i = 0; i < n; i += 16) {
            f32x16 v = load_up_to(x + i * width, n - i, kind);
            i32x16 angle = (i32x16)load_up_to((const uint8_t *)(angles + i), n - i, FLOAT32);
            f32x16 cos = (f32x16)__builtin_shuffle(angle, even), sin = (f32x16)__builtin_shuffle(angle, odd);
            f32x16 other = (f32x16)__builtin_shuffle((i32x16)v, swapped);
            store_up_to(x + i * width, fma16(v, cos, sign * other * sin), n - i, kind);
        }
    }
}

INLINE void one_row(const Rows *call, int64_t row, const int32_t kind) {
    int64_t width = bytes_of_number(kind);
    const uint8_t *x = call->x + row * call->x_stride * (call->operation == NORM || call->operation == ADD_NORM ? 4 : width);
    uint8_t *out = call->out + row * call->out_stride * (call->operation == ADD_NORM ? 4 : width);
    switch (call->operation) {
        case NORM: norm_row(x, FLOAT32, call->size, call->gain, call->eps, out, kind, 0); break;
        case ADD_NORM: norm_row(x, FLOAT32, call->size, call->gain, call->eps, out, kind, 1); break;
        case GATE: gate_row(x, call->size, call->activation, out, kind); break;
        default: rotate_row(call, row, kind);
    }
}

static void some_rows(void *data, int64_t first, int64_t end) {
    const Rows *call = data;
    for (int64_t row = first; row < end; row++) switch (call->kind) {
        case FLOAT32: one_row(call, row, FLOAT32); break;
        case BFLOAT16: one_row(call, row, BFLOAT16); break;
        default: one_row(call, row, FLOAT16);
    }
}

enum { TURN = 1 << 12, COST = 256 };  // numbers of a turn; cost of a number

// Below: program: where the call is recorded; NULL: it is run. Returns 0, or -1 without memory.
static int submit(Rows rows, int64_t numbers, Program *program, Parallel parallel, int32_t num_threads) {
    Program own = {0}, *to = program ? program : &own;
    Rows *call = add_call(to, sizeof *call);
    if (call) {
        *call = rows;
        int64_t turn = TURN / (numbers / (rows.num_rows ? rows.num_rows : 1) + 1) + 1;
        add_phase(to, (Phase){some_rows, NULL, call, rows.num_rows, turn, COST * numbers});
    }
    return record_or_run(program, &own, parallel, num_threads);
}

// x [num_rows, size] float32 -> out, of `kind`; or out, float32, += it.
int norm_rows(const float *x, int64_t x_stride, int64_t num_rows, int64_t size, const float *gain, float eps,
              uint8_t *out, int64_t out_stride, int32_t kind, int32_t adds, Program *program, Parallel parallel, int32_t num_threads) {
    Rows call = {adds ? ADD_NORM : NORM, kind, 0, (uint8_t *)x, out, x_stride, out_stride, num_rows, size, gain, NULL, eps, 0, 0};
    return submit(call, num_rows * size, program, parallel, num_threads);
}

// x [num_rows, 2 * size], gate then up -> out [num_rows, size].
int gate_rows(const uint8_t *x, int64_t x_stride, int64_t num_rows, int64_t size, int32_t activation, uint8_t *out,
              int32_t kind, Program *program, Parallel parallel, int32_t num_threads) {
    Rows call = {GATE, kind, activation, (uint8_t *)x, out, x_stride, size, num_rows, size, NULL, NULL, 0, 0, 0};
    return submit(call, 4 * num_rows * size, program, parallel, num_threads);
}

// x [num_rows, heads, size] in place; gain [2, size] or NULL; angles [num_rows, size / 2, (cos, sin)].
int rotate_rows(uint8_t *x, int64_t x_stride, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t size,
                const float *angles, const float *gain, float eps, int32_t kind, Program *program, Parallel parallel,
                int32_t num_threads) {
    Rows call = {ROTATE, kind, 0, x, x, x_stride, x_stride, num_rows, size, gain, angles, eps, num_heads, num_kv_heads};
    return submit(call, num_rows * (num_heads + num_kv_heads) * size, program, parallel, num_threads);
}
