// Products of some rows and one or two runs of 16 outputs. Rows are packed in tiles of 1, 2, 4 or 8. With two runs a
// broadcast input meets both: there are as many sums as registers hold, and half the loads.
//
// Packed inputs of a tile of R rows:
//   float32   [inputs][R]; of a single row the sums of each 16 inputs follow
//   rounded   for each group of 32 inputs: [8][R] words of four signed bytes; the scale of each row: [R] float32; the
//             sum of its bytes, of inputs 0 to 15, of 16 to 31, and of all: [3][R]. Where the kind has minima this is
//             times the scale, float32; else it is times the zero, negative, int32
//   pairs     of inputs that are bfloat16 numbers: for each group [16][R] words of two, then their sum: [R] float32
//   integers  of a scale for each row: [inputs / 4][R] words of four signed bytes, then the sum of all: [R] int32, and
//             the scale: [R] float32

#pragma once

#include "blocks.h"

#if defined(__AVX512F__)
enum { TILE = 8 };  // rows of the largest tile, whose sums with two runs are in registers; fewer rows meet one run
#else
enum { TILE = 4 };
#endif
enum { FLOATS, ROUNDED, PAIRS, INTEGERS };  // forms of packed inputs
enum { WORDS = 12, PAIR_WORDS = 17 };  // 4-byte words of a group of a row, rounded, and in pairs

typedef struct {
    u32x16 codes[16];  // of two inputs, less their zeros where there are no minima: bfloat16 numbers
    f32x16 scales[2], minima;
} Pairs;

// What a chunk of 256 inputs of 16 outputs is unpacked to.
typedef union {
    float weights[CHUNK][LANES];
    Group groups[CHUNK / GROUP];
    Pairs pairs[CHUNK / GROUP];
} __attribute__((aligned(64))) Chunk;

// The weights of a group to [32][16], bit by bit as the reference.
INLINE void expand_group(int kind, const Group *group, float (*weights)[LANES]) {
    for (int i = 0; i < GROUP; i++) {
        f32x16 scale = group->scales[i / 16], code = number_at(kind, group, i);
        f32x16 weight = has_minima(kind) ? code * scale - group->minima : code * scale;
        memcpy(weights[i], &weight, 64);
    }
}

INLINE void pair_group(int kind, Group *group, Pairs *out) {
    memcpy(out->scales, group->scales, sizeof out->scales);
    out->minima = kind == NIBBLES ? group->scales[0] * group->zeros : group->minima;
    UNROLLED
    for (int i = 0; i < 16; i++) {
#if defined(__AVX512BW__)
        if (kind == NIBBLES) {  // 0 to 15 as bfloat16 numbers, by a table
            const __m512i table = (__m512i)(uint16_t __attribute__((vector_size(64)))){
                0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
            u32x16 two = group->codes[i / 2] >> 8 * (i % 2) & 0x000f000f;
            out->codes[i] = (u32x16)_mm512_permutexvar_epi16((__m512i)two, table);
            continue;
        }
#endif
        f32x16 low = number_at(kind, group, 2 * i), high = number_at(kind, group, 2 * i + 1);
        if (kind == NIBBLES) low += group->zeros, high += group->zeros;
        out->codes[i] = (u32x16)low >> 16 | (u32x16)high;
    }
}

INLINE void unpack_chunk(int kind, const Run *run, int64_t first, int num_groups, int form, Chunk *chunk) {
    int per_block = LAYOUTS[kind].inputs / GROUP;
    for (int i = 0; i < num_groups; i++) {
        Group group, *to = form == ROUNDED ? &chunk->groups[i] : &group;
        unpack(kind, run, (first + i) / per_block, (int)((first + i) % per_block), to);
        if (form == FLOATS) expand_group(kind, &group, chunk->weights + GROUP * i);
        else if (form == PAIRS) pair_group(kind, &group, &chunk->pairs[i]);
    }
}

// Below: S runs, `sums` [S][stride] of which [R][16] += the product of a chunk of each run with inputs of R rows.

INLINE void float_tile(int R, int S, const Chunk *chunks, int num_groups, const float *x, float *sums, int64_t stride) {
    for (int part = 0; part < LANES; part += WIDTH) {
        Wide sum[2][TILE], weight[2];
        UNROLLED
        for (int s = 0; s < S; s++)
            UNROLLED
            for (int r = 0; r < R; r++) memcpy(&sum[s][r], sums + stride * s + LANES * r + part, sizeof(Wide));
        for (int i = 0; i < GROUP * num_groups; i++) {
            UNROLLED
            for (int s = 0; s < S; s++) memcpy(&weight[s], chunks[s].weights[i] + part, sizeof(Wide));
            UNROLLED
            for (int r = 0; r < R; r++)
                UNROLLED
                for (int s = 0; s < S; s++) sum[s][r] = fma_wide(weight[s], x[i * R + r], sum[s][r]);
        }
        UNROLLED
        for (int s = 0; s < S; s++)
            UNROLLED
            for (int r = 0; r < R; r++) memcpy(sums + stride * s + LANES * r + part, &sum[s][r], sizeof(Wide));
    }
}

// Of one group and `half` of its inputs, or all; x: [R] words for each four inputs. dots [S][R].
INLINE void dots_of_group(int R, int S, int halves, int half, const Chunk *chunks, int group, const int32_t *x, i32x16 (*dots)[TILE]) {
    for (int j = halves ? 4 * half : 0; j < (halves ? 4 * half + 4 : 8); j++) {
        u32x16 codes[2];
        UNROLLED
        for (int s = 0; s < S; s++) codes[s] = chunks[s].groups[group].codes[j];
        UNROLLED
        for (int r = 0; r < R; r++)
            UNROLLED
            for (int s = 0; s < S; s++) dots[s][r] = dot_bytes(dots[s][r], codes[s], x[j * R + r]);
    }
}

INLINE void rounded_tile(int R, int S, int halves, int with_minima, const Chunk *chunks, int num_groups, const int32_t *x,
                         float *sums, int64_t stride) {
    for (int i = 0; i < num_groups; i++, x += WORDS * R) {
        const float *of_row = (const float *)x + 8 * R;  // scale, sums
        for (int half = 0; half < 1 + halves; half++) {
            int sum_at = halves ? 1 + half : 3;
            i32x16 dots[2][TILE];
            UNROLLED
            for (int r = 0; r < R; r++)
                UNROLLED
                for (int s = 0; s < S; s++) dots[s][r] = (i32x16){} + (with_minima ? 0 : x[(8 + sum_at) * R + r]);
            dots_of_group(R, S, halves, half, chunks, i, x, dots);
            UNROLLED
            for (int s = 0; s < S; s++) {
                const Group *group = &chunks[s].groups[i];
                f32x16 scale = group->scales[half], minima = group->minima;
                UNROLLED
                for (int r = 0; r < R; r++) {
                    f32x16 sum = floats_of(sums + stride * s + LANES * r);
                    sum = fma16(__builtin_convertvector(dots[s][r], f32x16) * of_row[r], scale, sum);
                    if (with_minima) sum = fma16(-minima, splat(of_row[sum_at * R + r]), sum);
                    memcpy(sums + stride * s + LANES * r, &sum, 64);
                }
            }
        }
    }
}

INLINE void pair_tile(int R, int S, int halves, int with_minima, const Chunk *chunks, int num_groups, const uint32_t *x,
                      float *sums, int64_t stride) {
    for (int i = 0; i < num_groups; i++, x += PAIR_WORDS * R) {
        for (int half = 0; half < 1 + halves; half++) {
            f32x16 dots[2][TILE];
            UNROLLED
            for (int r = 0; r < R; r++)
                UNROLLED
                for (int s = 0; s < S; s++) dots[s][r] = splat(0);
            for (int j = halves ? 8 * half : 0; j < (halves ? 8 * half + 8 : 16); j++) {
                u32x16 codes[2];
                UNROLLED
                for (int s = 0; s < S; s++) codes[s] = chunks[s].pairs[i].codes[j];
                UNROLLED
                for (int r = 0; r < R; r++)
                    UNROLLED
                    for (int s = 0; s < S; s++) dots[s][r] = dot_pairs(dots[s][r], codes[s], x[j * R + r]);
            }
            UNROLLED
            for (int s = 0; s < S; s++) {
                const Pairs *pairs = &chunks[s].pairs[i];
                UNROLLED
                for (int r = 0; r < R; r++) {
                    f32x16 sum = fma16(dots[s][r], pairs->scales[half], floats_of(sums + stride * s + LANES * r));
                    if (with_minima) sum = fma16(-pairs->minima, splat(((const float *)x)[16 * R + r]), sum);
                    memcpy(sums + stride * s + LANES * r, &sum, 64);
                }
            }
        }
    }
}

// Of bytes whose zero is 128, with integers of one scale a row; outputs have one each. All inputs at once: sums = it.
INLINE void integer_tile(int R, int S, const Run *runs, int64_t num_groups, const int32_t *x, float *sums, int64_t stride) {
    i32x16 dots[2][TILE] = {};
    for (int64_t i = 0; i < 8 * num_groups; i++) {
        u32x16 codes[2];
        UNROLLED
        for (int s = 0; s < S; s++) codes[s] = load_words(runs[s].blocks + 64 * i);
        UNROLLED
        for (int r = 0; r < R; r++)
            UNROLLED
            for (int s = 0; s < S; s++) dots[s][r] = dot_bytes(dots[s][r], codes[s], x[i * R + r]);
    }
    x += 8 * num_groups * R;
    UNROLLED
    for (int s = 0; s < S; s++)
        UNROLLED
        for (int r = 0; r < R; r++) {
            f32x16 sum = __builtin_convertvector(dots[s][r] - (x[r] << 7), f32x16) * floats_of(runs[s].scales);
            sum *= ((const float *)x)[R + r];
            memcpy(sums + stride * s + LANES * r, &sum, 64);
        }
}

// Of one group with rounded inputs of one row.
INLINE f32x16 add_rounded(int kind, const Group *group, const int32_t *x, f32x16 sum) {
    const float *of_row = (const float *)x + 8;  // scale, sums
    int halves = kind == Q6_K;
    f32x16 scale = splat(of_row[0]);
    UNROLLED
    for (int half = 0; half < 1 + halves; half++) {
        i32x16 dots = {};
        UNROLLED
        for (int j = halves ? 4 * half : 0; j < (halves ? 4 * half + 4 : 8); j++) dots = dot_bytes(dots, group->codes[j], x[j]);
        if (!has_minima(kind)) dots += x[8 + (halves ? 1 + half : 3)];
        sum = fma16(__builtin_convertvector(dots, f32x16), group->scales[half] * scale, sum);
    }
    return has_minima(kind) ? fma16(-group->minima, splat(of_row[3]), sum) : sum;
}

enum { AHEAD = 4096 };  // bytes: blocks of the K types are not read in order, which the processor does not foresee

// Addresses may be past the end: nothing is read there.
INLINE void prefetch(const uint8_t *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i);
}

// Of one row and all its inputs, which are unpacked in registers.
INLINE f32x16 row_product(int kind, int is_rounded, const Run *run, int64_t num_groups, const float *x) {
    int per_block = LAYOUTS[kind].inputs / GROUP;
    const float *totals = x + GROUP * num_groups;
    f32x16 sums[4] = {};
    for (int64_t block = 0; block < num_groups / per_block; block++) {
        if (per_block > 1) prefetch(run->blocks + LANES * LAYOUTS[kind].bytes * block + AHEAD, LANES * LAYOUTS[kind].bytes);
        UNROLLED
        for (int i = 0; i < per_block; i++) {
            Group group;
            unpack(kind, run, block, i, &group);
            if (is_rounded) {
                sums[i % 2] = add_rounded(kind, &group, (const int32_t *)x, sums[i % 2]);
                x += WORDS;
                continue;
            }
            UNROLLED
            for (int half = 0; half < 2; half++) {
                f32x16 dots[2] = {}, total = splat(totals[half]);
                UNROLLED
                for (int j = 16 * half; j < 16 * half + 16; j++)
                    dots[j & 1] = fma16(number_at(kind, &group, j), splat(x[j]), dots[j & 1]);
                sums[half] = fma16(dots[0] + dots[1], group.scales[half], sums[half]);
                if (has_minima(kind)) sums[2 + half] = fma16(-group.minima, total, sums[2 + half]);
            }
            totals += 2;
            x += GROUP;
        }
    }
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

// As above, of inputs in pairs.
INLINE f32x16 pair_row(int kind, const Run *run, int64_t num_groups, const uint32_t *x) {
    f32x16 sums[2] = {};
    for (int64_t i = 0; i < num_groups; i++, x += PAIR_WORDS) {
        Group group;
        Pairs pairs;
        float total;
        unpack(kind, run, i, 0, &group);
        pair_group(kind, &group, &pairs);
        f32x16 dots[2] = {};
        UNROLLED
        for (int j = 0; j < 16; j++) dots[j & 1] = dot_pairs(dots[j & 1], pairs.codes[j], x[j]);
        memcpy(&total, x + 16, 4);
        sums[0] = fma16(dots[0] + dots[1], pairs.scales[0], sums[0]);
        sums[1] = fma16(-pairs.minima, splat(total), sums[1]);
    }
    return sums[0] + sums[1];
}
