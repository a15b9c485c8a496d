// Products of some rows and 16 outputs. Rows are packed in tiles of 1, 2, 4, 8 or 16.
//
// Packed inputs of a tile of R rows:
//   float32   [inputs][R]; of a single row the sums of each 16 inputs follow
//   rounded   for each group of 32 inputs: [8][R] words of four signed bytes, then the scale of each row, then the sum
//             of its bytes times that scale: of inputs 0 to 15, of inputs 16 to 31, and of all: [4][R] float32

#pragma once

#include "blocks.h"

#if defined(__AVX512F__)
enum { TILE = 16 };  // rows of the largest tile, whose sums are in registers
#else
enum { TILE = 4 };
#endif
enum { WORDS = 12 };  // 4-byte words of a group of a row, rounded

// What a chunk of 256 inputs of 16 outputs is unpacked to.
typedef union {
    float weights[CHUNK][LANES];
    Group groups[CHUNK / GROUP];
} __attribute__((aligned(64))) Chunk;

INLINE const uint8_t *group_at(int kind, const uint8_t *run, int64_t group, int *within) {
    int per_block = LAYOUTS[kind].inputs / GROUP;
    *within = (int)(group % per_block);
    return run + LANES * LAYOUTS[kind].bytes * (group / per_block);
}

// The weights of a group to [32][16], bit by bit as the reference.
INLINE void expand_group(int kind, const uint8_t *block, int within, float (*weights)[LANES]) {
    Group group;
    unpack(kind, block, within, &group);
    for (int i = 0; i < GROUP; i++) {
        f32x16 code = byte_of(group.codes[i / 4], i % 4), scale = group.scales[i / 16];
        f32x16 weight = has_minima(kind) ? code * scale - group.minima : (code - (float)zero_of(kind)) * scale;
        memcpy(weights[i], &weight, 64);
    }
}

INLINE void unpack_chunk(int kind, const uint8_t *run, int64_t first, int num_groups, int is_rounded, Chunk *chunk) {
    for (int i = 0; i < num_groups; i++) {
        int within;
        const uint8_t *block = group_at(kind, run, first + i, &within);
        if (!is_rounded) {
            expand_group(kind, block, within, chunk->weights + GROUP * i);
            continue;
        }
        unpack(kind, block, within, &chunk->groups[i]);
        if (!has_minima(kind)) chunk->groups[i].minima = chunk->groups[i].scales[0] * (float)zero_of(kind);
    }
}

// sums [R][16] += the product of a chunk with float32 inputs.
INLINE void float_tile(int R, const Chunk *chunk, int num_groups, const float *x, float *sums) {
    for (int part = 0; part < LANES; part += WIDTH) {
        Wide sum[TILE], weight;
        UNROLLED
        for (int r = 0; r < R; r++) memcpy(&sum[r], sums + LANES * r + part, sizeof(Wide));
        for (int i = 0; i < GROUP * num_groups; i++) {
            memcpy(&weight, chunk->weights[i] + part, sizeof(Wide));
            UNROLLED
            for (int r = 0; r < R; r++) sum[r] = fma_wide(weight, x[i * R + r], sum[r]);
        }
        UNROLLED
        for (int r = 0; r < R; r++) memcpy(sums + LANES * r + part, &sum[r], sizeof(Wide));
    }
}

// Of one group with rounded inputs of one row of R.
INLINE f32x16 add_rounded(int R, int halves, const Group *group, const int32_t *x, f32x16 sum) {
    const float *of_row = (const float *)x + 8 * R;  // scale, sums
    i32x16 dots[2] = {{}, {}};
    for (int i = 0; i < 8; i++) dots[halves ? i / 4 : 0] = dot_bytes(dots[halves ? i / 4 : 0], group->codes[i], x[i * R]);
    f32x16 scale = splat(of_row[0]);
    sum = fma16(__builtin_convertvector(dots[0], f32x16), group->scales[0] * scale, sum);
    if (!halves) return fma16(-group->minima, splat(of_row[3 * R]), sum);
    sum = fma16(__builtin_convertvector(dots[1], f32x16), group->scales[1] * scale, sum);
    sum = fma16(-group->minima, splat(of_row[R]), sum);  // Q6_K: of the first half
    return fma16(group->scales[1] * -(float)zero_of(Q6_K), splat(of_row[2 * R]), sum);
}

INLINE void rounded_tile(int R, int halves, const Chunk *chunk, int num_groups, const int32_t *x, float *sums) {
    f32x16 sum[TILE];
    UNROLLED
    for (int r = 0; r < R; r++) sum[r] = floats_of(sums + LANES * r);
    for (int i = 0; i < num_groups; i++) {
        Group group = chunk->groups[i];
        UNROLLED
        for (int r = 0; r < R; r++) sum[r] = add_rounded(R, halves, &group, x + WORDS * R * i + r, sum[r]);
    }
    UNROLLED
    for (int r = 0; r < R; r++) memcpy(sums + LANES * r, &sum[r], 64);
}

INLINE void prefetch(const uint8_t *from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(from + i);
}

// Of one row and all its inputs, which are unpacked in registers.
INLINE f32x16 row_product(int kind, int is_rounded, const uint8_t *run, int64_t num_groups, const float *x) {
    int per_block = LAYOUTS[kind].inputs / GROUP;
    const float *totals = x + GROUP * num_groups;
    f32x16 sums[4] = {};
    for (int64_t first = 0; first < num_groups; first += per_block, run += LANES * LAYOUTS[kind].bytes) {
        UNROLLED
        for (int i = 0; i < per_block; i++) {
            Group group;
            unpack(kind, run, i, &group);
            if (is_rounded) {
                if (!has_minima(kind)) group.minima = group.scales[0] * (float)zero_of(kind);
                sums[0] = add_rounded(1, kind == Q6_K, &group, (const int32_t *)x, sums[0]);
                x += WORDS;
                continue;
            }
            UNROLLED
            for (int half = 0; half < 2; half++) {
                f32x16 dots[2] = {}, total = splat(totals[half]);
                UNROLLED
                for (int j = 16 * half; j < 16 * half + 16; j++) {
                    f32x16 code = byte_of(group.codes[j / 4], j % 4);
                    if (zero_of(kind)) code -= (float)zero_of(kind);
                    dots[j & 1] = fma16(code, splat(x[j]), dots[j & 1]);
                }
                sums[half] = fma16(dots[0] + dots[1], group.scales[half], sums[half]);
                if (has_minima(kind)) sums[2 + half] = fma16(-group.minima, total, sums[2 + half]);
            }
            totals += 2;
            x += GROUP;
        }
    }
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}
