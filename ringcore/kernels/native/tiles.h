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
enum { FEW = 4 };  // rows for which float32 numbers are unpacked in registers, where there are 32
enum { FLOATS, ROUNDED, PAIRS, INTEGERS };  // forms of packed inputs
enum { WORDS = 12, PAIR_WORDS = 17 };  // 4-byte words of a group of a row, rounded, and in pairs

typedef struct {
    u32x16 codes[16];  // of two inputs, less their zeros where there are no minima: bfloat16 numbers
    f32x16 scales[2], minima;
} Pairs;

// What a chunk of 256 inputs of 16 outputs is unpacked to.
typedef union {
    float weights[CHUNK][LANES];
    Pairs pairs[CHUNK / GROUP];
} __attribute__((aligned(64))) Chunk;

// Of input `i` of the group, bit by bit as the reference.
INLINE f32x16 weight_at(int kind, const Group *group, int i) {
    f32x16 scaled = number_at(kind, group, i) * group->scales[i / 16];
    return has_minima(kind) ? scaled - group->minima : scaled;
}

// The weights of a group to [32][16].
INLINE void expand_group(int kind, const Group *group, float (*weights)[LANES]) {
    for (int i = 0; i < GROUP; i++) {
        f32x16 weight = weight_at(kind, group, i);
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
        Group group;
        unpack(kind, run, (first + i) / per_block, (int)((first + i) % per_block), &group);
        if (form == FLOATS) expand_group(kind, &group, chunk->weights + GROUP * i);
        else pair_group(kind, &group, &chunk->pairs[i]);
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

// As `float_tile` of all inputs of one run, to the same bits: of few rows, for which numbers are unpacked in registers.
INLINE void float_rows(int kind, int R, const Run *run, int64_t num_groups, const float *x, float *sums) {
    int per_block = LAYOUTS[kind].inputs / GROUP;
    f32x16 sum[FEW] = {};
    for (int64_t block = 0; block < num_groups / per_block; block++)
        for (int i = 0; i < per_block; i++, x += GROUP * R) {
            Group group;
            unpack(kind, run, block, i, &group);
            UNROLLED
            for (int j = 0; j < GROUP; j++) {
                f32x16 weight = weight_at(kind, &group, j);
                UNROLLED
                for (int r = 0; r < R; r++) sum[r] = fma16(weight, splat(x[j * R + r]), sum[r]);
            }
        }
    UNROLLED
    for (int r = 0; r < R; r++) memcpy(sums + LANES * r, &sum[r], 64);
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

enum { AHEAD = 4096 };  // bytes: blocks of the K types are not read in order, which the processor does not foresee

// Addresses may be past the end: nothing is read there.
INLINE void prefetch(const uint8_t *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i);
}

// Group `index` of a run with inputs of R rows, x [WORDS][R]: unpacked in registers, where the sums stay.
INLINE void add_rounded(int kind, int R, const Run *run, int64_t block, int index, const int32_t *x, f32x16 *sum) {
    const float *of_row = (const float *)x + 8 * R;  // scale, sums
    int halves = kind == Q6_K ? 2 : 1, words = 8 / halves;
    Group group;
    unpack(kind, run, block, index, &group);
    UNROLLED
    for (int half = 0; half < halves; half++) {
        i32x16 dots[TILE];
        UNROLLED
        for (int r = 0; r < R; r++) dots[r] = (i32x16){} + (has_minima(kind) ? 0 : x[(halves == 2 ? 9 + half : 11) * R + r]);
        UNROLLED
        for (int j = words * half; j < words * (half + 1); j += words_together(bits_of(kind)))
            UNROLLED
            for (int r = 0; r < R; r++) dots[r] = dot_words(bits_of(kind), dots[r], group.codes + j, x + j * R + r, R);
        UNROLLED
        for (int r = 0; r < R; r++)
            sum[r] = fma16(__builtin_convertvector(dots[r], f32x16), group.scales[half] * of_row[r], sum[r]);
    }
    UNROLLED
    for (int r = 0; r < R && has_minima(kind); r++) sum[r] = fma16(-group.minima, splat(of_row[3 * R + r]), sum[r]);
}

// sums [R][16] = the product of a run with R rows of rounded inputs. Of more rows than one the next run is prefetched:
// these take so long that the processor sees no stream.
INLINE void rounded_rows(int kind, int R, const Run *run, int64_t num_groups, const int32_t *x, float *sums) {
    int64_t per_block = LAYOUTS[kind].inputs / GROUP, bytes = LANES * LAYOUTS[kind].bytes, blocks = num_groups / per_block;
    f32x16 sum[TILE] = {};
    for (int64_t block = 0; block < blocks; block++) {
        if (R > 1) prefetch(run->blocks + bytes * (block + blocks), bytes);
        else if (per_block > 1) prefetch(run->blocks + bytes * block + AHEAD, bytes);
        if (R == 1) {
            UNROLLED
            for (int i = 0; i < per_block; i++, x += WORDS) add_rounded(kind, 1, run, block, i, x, sum + i % 2);
        } else
            for (int i = 0; i < per_block; i++, x += WORDS * R) add_rounded(kind, R, run, block, i, x, sum);
    }
    if (R == 1) sum[0] += sum[1];
    UNROLLED
    for (int r = 0; r < R; r++) memcpy(sums + LANES * r, &sum[r], 64);
}

// Of one row and all its inputs, which are unpacked in registers.
INLINE f32x16 row_product(int kind, const Run *run, int64_t num_groups, const float *x) {
    int per_block = LAYOUTS[kind].inputs / GROUP;
    const float *totals = x + GROUP * num_groups;
    f32x16 sums[4] = {};
    for (int64_t block = 0; block < num_groups / per_block; block++) {
        if (per_block > 1) prefetch(run->blocks + LANES * LAYOUTS[kind].bytes * block + AHEAD, LANES * LAYOUTS[kind].bytes);
        UNROLLED
        for (int i = 0; i < per_block; i++) {
            Group group;
            unpack(kind, run, block, i, &group);
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
