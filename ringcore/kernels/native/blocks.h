// Blocks of quantized weights, 16 outputs interleaved: GGUF types, and codes whose scales are stored beside them.
//
// An output is a row of blocks, and a block is some fields: scales, then codes. Interleaved, 16 rows are one run of
// blocks of 16 times the bytes, whose fields are cut into units: the first unit of all 16 rows, then the second. A unit
// of codes is 4 bytes, so a vector of 64 bytes has codes of the same inputs of 16 outputs. No byte is changed.
//
// NIBBLES, BYTES and E4M3 have codes alone, 32 in a block: weight = (code - zero) * scale, with scales and zeros for
// each 2^n groups of 32 inputs, of all 16 outputs. Two inputs of a pair are 16 bits apart in a word of NIBBLES. E2M1, of
// MXFP4, has codes alone as well, two inputs a byte; scales are a byte for each block, an exponent + 127: EXPONENTS.

#pragma once

#include "vectors.h"

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, NIBBLES, BYTES, E4M3, E2M1, EXPONENTS };
enum { LANES = 16, GROUP = 32, CHUNK = 256 };  // outputs; inputs that share a scale; inputs that are unpacked at a time

typedef struct {
    int offset, count, bytes;  // in a block of one row: `count` units of `bytes`
} Field;

typedef struct {
    int inputs, bytes;  // of a block
    Field fields[5];    // up to the first without units
} Layout;

static const Layout LAYOUTS[] = {
    [Q4_0] = {32, 18, {{0, 1, 2}, {2, 4, 4}}},
    [Q4_1] = {32, 20, {{0, 2, 2}, {4, 4, 4}}},
    [Q5_0] = {32, 22, {{0, 1, 2}, {2, 5, 4}}},
    [Q5_1] = {32, 24, {{0, 2, 2}, {4, 5, 4}}},
    [Q8_0] = {32, 34, {{0, 1, 2}, {2, 8, 4}}},
    [Q4_K] = {256, 144, {{0, 2, 2}, {4, 12, 1}, {16, 32, 4}}},
    [Q5_K] = {256, 176, {{0, 2, 2}, {4, 12, 1}, {16, 40, 4}}},
    [Q6_K] = {256, 210, {{0, 48, 4}, {192, 16, 1}, {208, 1, 2}}},
    [IQ4_NL] = {32, 18, {{0, 1, 2}, {2, 4, 4}}},
    [NIBBLES] = {32, 16, {{0, 4, 4}}},
    [BYTES] = {32, 32, {{0, 8, 4}}},
    [E4M3] = {32, 32, {{0, 8, 4}}},
    [E2M1] = {32, 16, {{0, 4, 4}}},
    [EXPONENTS] = {32, 1, {{0, 1, 1}}},
};

// 16 outputs.
typedef struct {
    const uint8_t *blocks;
    const float *scales;   // [scales of an output][16], where blocks have none
    const uint8_t *zeros;  // likewise, of BYTES less `least_zero`; of E2M1 the exponents
    int shift;             // a scale is of 2^shift groups
    int least_zero;        // 0 or 1: zeros of 1 to 256 are bytes too
} Run;

// The units of one field of 16 rows from `rows` into `run`, or back; `bytes`, of a unit, is a constant.
INLINE void move_units(int bytes, int count, uint8_t *rows, int num_rows, int64_t row_bytes, uint8_t *run, int restore) {
    for (int row = 0; row < num_rows; row++)
        for (int unit = 0; unit < count; unit++) {
            uint8_t *of_row = rows + row * row_bytes + unit * bytes, *of_run = run + (unit * LANES + row) * bytes;
            if (restore) memcpy(of_row, of_run, bytes);
            else memcpy(of_run, of_row, bytes);
        }
}

// The first num_bytes, whole blocks, of up to 16 rows from `rows` into `run`, or back; what has no row stays as it is
// there.
static void interleave(int kind, uint8_t *rows, int num_rows, int64_t row_bytes, int64_t num_bytes, uint8_t *run, int restore) {
    const Layout *layout = &LAYOUTS[kind];
    for (int64_t start = 0; start < num_bytes; start += layout->bytes)
        for (const Field *field = layout->fields; field < layout->fields + 5 && field->count; field++) {
            uint8_t *from = rows + start + field->offset, *to = run + LANES * (start + field->offset);
            if (field->bytes == 4) move_units(4, field->count, from, num_rows, row_bytes, to, restore);
            else if (field->bytes == 2) move_units(2, field->count, from, num_rows, row_bytes, to, restore);
            else move_units(1, field->count, from, num_rows, row_bytes, to, restore);
        }
}

// A group of 32 inputs of 16 outputs: weight = code * scale - minimum, or (code - zero) * scale without minima. Code i
// has inputs 4 * i to 4 * i + 3 in its bytes, of E2M1 8 * i to 8 * i + 7. Q6_K has a scale for each 16 inputs; the others have one, twice.
typedef struct {
    u32x16 codes[8];
    f32x16 scales[2], minima, zeros;
} Group;

INLINE int has_minima(int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }

INLINE int has_zeros(int kind) { return kind == NIBBLES || kind == BYTES; }  // of their own

INLINE int zero_of(int kind) {
    switch (kind) {
        case Q4_0: return 8;
        case Q5_0: return 16;
        case Q6_K: return 32;
        case Q8_0: case IQ4_NL: return 128;
        default: return 0;
    }
}

INLINE int bits_of(int kind) {  // of a code in its byte
    switch (kind) {
        case Q4_0: case Q4_1: case Q4_K: return 4;
        case Q5_0: case Q5_1: case Q5_K: return 5;
        case Q6_K: return 6;
        default: return 8;
    }
}

INLINE u32x16 spread_bits(u32x16 bits, int first) {  // bits `first` to `first` + 3 to bit 4 of four bytes
    u32x16 four = bits >> first & 15;
    return ((four | four << 7 | four << 14 | four << 21) & 0x01010101) << 4;
}

INLINE u32x16 iq4_codes(u32x16 nibbles) {
    static const uint8_t table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
#if defined(__AVX512BW__)
    __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (u32x16)_mm512_shuffle_epi8(entries, (__m512i)nibbles);
#else
    uint8_t bytes[64];
    memcpy(bytes, &nibbles, 64);
    for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i]];
    return load_words(bytes);
#endif
}

// Scales and minima of 6 bits, in 12 units of a byte: see `gguf_blocks.py`.
INLINE void k_scales(const uint8_t *block, int group, Group *out) {
    u8x16 first, second, third, scale, minimum;
    const uint8_t *bytes = block + LANES * 4;
    if (group < 4) {
        memcpy(&scale, bytes + LANES * group, LANES);
        memcpy(&minimum, bytes + LANES * (group + 4), LANES);
        scale &= 63, minimum &= 63;
    } else {
        memcpy(&first, bytes + LANES * (group - 4), LANES);
        memcpy(&second, bytes + LANES * group, LANES);
        memcpy(&third, bytes + LANES * (group + 4), LANES);
        scale = (third & 15) | (first >> 2 & 48);
        minimum = (third >> 4) | (second >> 2 & 48);
    }
    out->scales[0] = out->scales[1] = floats_of_bytes(scale) * halves_of(block);
    out->minima = floats_of_bytes(minimum) * halves_of(block + LANES * 2);
}

INLINE void unpack_q6(const uint8_t *block, int group, Group *out) {
    // Of 128 inputs: 64 bytes of lower bits, of which the upper nibbles are of inputs 64 and on; 32 bytes of upper bits.
    int half = group / 4, quarter = group % 4;
    const uint8_t *low = block + LANES * (64 * half + 32 * (quarter & 1)), *high = block + LANES * (128 + 32 * half);
    for (int i = 0; i < 8; i++) {
        u32x16 nibbles = load_words(low + 64 * i) >> (quarter < 2 ? 0 : 4) & 0x0f0f0f0f;
        out->codes[i] = nibbles | (load_words(high + 64 * i) >> 2 * quarter & 0x03030303) << 4;
    }
    f32x16 d = halves_of(block + LANES * 208);
    for (int i = 0; i < 2; i++) {
        i8x16 scale;
        memcpy(&scale, block + LANES * (192 + 2 * group + i), LANES);
        out->scales[i] = floats_of_signed_bytes(scale) * d;
    }
}

INLINE void unpack_codes(int kind, const uint8_t *codes, Group *out) {
    for (int i = 0; i < 8; i++)
        if (kind != NIBBLES) out->codes[i] = load_words(codes + 64 * i);
        else out->codes[i] = load_words(codes + 64 * (i % 4)) >> (i < 4 ? 0 : 4) & 0x0f0f0f0f;
}

// Group `group` of block `index` of a run.
INLINE void unpack(int kind, const Run *run, int64_t index, int group, Group *out) {
    const uint8_t *block = run->blocks + LANES * LAYOUTS[kind].bytes * index, *codes;
    if (kind == E2M1) {
        u8x16 exponents;
        memcpy(&exponents, run->zeros + LANES * index, LANES);
        out->scales[0] = out->scales[1] = (f32x16)(__builtin_convertvector(exponents, u32x16) << 23);
        for (int i = 0; i < 4; i++) out->codes[i] = load_words(block + 64 * i);
        return;
    }
    if (kind >= NIBBLES) {
        unpack_codes(kind, block, out);
        out->scales[0] = out->scales[1] = floats_of(run->scales + LANES * (index >> run->shift));
        if (has_zeros(kind)) {
            u8x16 zeros;
            memcpy(&zeros, run->zeros + LANES * (index >> run->shift), LANES);
            out->zeros = floats_of_bytes(zeros);
            if (kind == BYTES) out->zeros += (float)run->least_zero;
        }
        return;
    }
    if (kind == Q6_K) {
        unpack_q6(block, group, out);
        return;
    }
    if (kind == Q4_K || kind == Q5_K) {
        k_scales(block, group, out);
        codes = block + LANES * ((kind == Q4_K ? 16 : 48) + group / 2 * 32);
        for (int i = 0; i < 8; i++) {
            out->codes[i] = load_words(codes + 64 * i) >> (group & 1 ? 4 : 0) & 0x0f0f0f0f;
            if (kind == Q5_K) {
                u32x16 fifth = load_words(block + LANES * 16 + 64 * i);
                out->codes[i] |= (fifth >> group & 0x01010101) << 4;
            }
        }
        return;
    }
    out->scales[0] = out->scales[1] = halves_of(block);
    if (has_minima(kind)) out->minima = -halves_of(block + LANES * 2);
    codes = block + LANES * (has_minima(kind) ? 4 : 2);
    if (kind == Q8_0) {
        for (int i = 0; i < 8; i++) out->codes[i] = load_words(codes + 64 * i) ^ 0x80808080;
        return;
    }
    u32x16 fifth = load_words(codes);
    if (kind == Q5_0 || kind == Q5_1) codes += 64;
    for (int i = 0; i < 4; i++) {
        u32x16 both = load_words(codes + 64 * i), low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
        if (kind == Q5_0 || kind == Q5_1) low |= spread_bits(fifth, 4 * i), high |= spread_bits(fifth, 4 * i + 16);
        out->codes[i] = kind == IQ4_NL ? iq4_codes(low) : low;
        out->codes[i + 4] = kind == IQ4_NL ? iq4_codes(high) : high;
    }
}

// Of input `i` of the group the code, less its zero.
INLINE f32x16 number_at(int kind, const Group *group, int i) {
    if (kind == E2M1) return e2m1_of(group->codes[i / 8] >> 4 * (i % 8));
    int place = kind == NIBBLES ? (i & 1) << 1 | (i >> 1 & 1) : i % 4;
    if (kind == E4M3) return e4m3_of(group->codes[i / 4], place);
    f32x16 code = byte_of(group->codes[i / 4], place);
    if (has_zeros(kind)) return code - group->zeros;
    return zero_of(kind) ? code - (float)zero_of(kind) : code;
}
