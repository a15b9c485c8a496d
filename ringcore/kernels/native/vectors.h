// Vectors of 16 numbers, one of each of 16 outputs. Intrinsics only where the compiler does not find the instruction.

#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

INLINE f32x16 splat(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE u32x16 load_words(const uint8_t *from) {
    u32x16 words;
    memcpy(&words, from, 64);
    return words;
}

INLINE f32x16 floats_of(const float *from) {
    f32x16 x;
    memcpy(&x, from, 64);
    return x;
}

// Byte i of each word, as a number.
INLINE f32x16 byte_of(u32x16 words, int i) {
#if defined(__AVX512BW__)
    const __m512i place = _mm512_add_epi32(_mm512_set4_epi32(12, 8, 4, 0), _mm512_set1_epi32(i));
    return (f32x16)_mm512_cvtepi32_ps(_mm512_maskz_shuffle_epi8(0x1111111111111111, (__m512i)words, place));
#else
    return __builtin_convertvector((i32x16)(words >> 8 * i & 255), f32x16);
#endif
}

// Byte i of each word, an FP8 number: exponents are 120 less than those of float32. NaN is not kept.
INLINE f32x16 e4m3_of(u32x16 words, int i) {
    u32x16 top = words << (24 - 8 * i);
    return (f32x16)((top & 0x80000000) | (top >> 4 & 0x07f00000)) * 0x1p120f;
}

// The lowest 4 bits of each word, an FP4 number: exponents are 126 less than those of float32.
INLINE f32x16 e2m1_of(u32x16 words) {
#if defined(__AVX512F__)
    const __m512 numbers = (__m512)(f32x16){0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return (f32x16)_mm512_permutexvar_ps((__m512i)words, numbers);
#else
    return (f32x16)((words & 8) << 28 | (words & 7) << 22) * 0x1p126f;
#endif
}

INLINE f32x16 floats_of_bytes(u8x16 bytes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#else
    return __builtin_convertvector(bytes, f32x16);
#endif
}

INLINE f32x16 floats_of_signed_bytes(i8x16 bytes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
    return __builtin_convertvector(bytes, f32x16);
#endif
}

INLINE i8x16 bytes_of(i32x16 words) {
#if defined(__AVX512F__)
    return (i8x16)_mm512_cvtepi32_epi8((__m512i)words);
#else
    return __builtin_convertvector(words, i8x16);
#endif
}

// a * b + c, rounded once where the processor can. Everything else is compiled without such contractions.
INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    union { f32x16 all; __m256 half[2]; } x = {a}, y = {b}, z = {c};
    z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
    z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
    return z.all;
#else
    return a * b + c;
#endif
}

INLINE int32_t sum_words(i32x16 words) {
    typedef int32_t i32x4 __attribute__((vector_size(16)));
    union { i32x16 all; i32x4 quarter[4]; } of = {words};
    i32x4 sums = of.quarter[0] + of.quarter[1] + (of.quarter[2] + of.quarter[3]);
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

// As many numbers as a register of the processor has.
#if defined(__AVX512F__)
typedef f32x16 Wide;
enum { WIDTH = 16 };
INLINE Wide fma_wide(Wide a, float b, Wide c) { return fma16(a, splat(b), c); }
#elif defined(__FMA__)
typedef __m256 Wide;
enum { WIDTH = 8 };
INLINE Wide fma_wide(Wide a, float b, Wide c) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c); }
#else
typedef float Wide __attribute__((vector_size(16)));
enum { WIDTH = 4 };
INLINE Wide fma_wide(Wide a, float b, Wide c) { return a * b + c; }
#endif

// 16 float16 numbers.
INLINE f32x16 halves_of(const uint8_t *from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    union { f32x16 all; __m256 half[2]; } out;
    for (int i = 0; i < 2; i++) out.half[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + i));
    return out.all;
#else
    f32x16 out;
    uint16_t bits[16];
    memcpy(bits, from, 32);
    for (int i = 0; i < 16; i++) {
        uint32_t sign = (uint32_t)(bits[i] & 0x8000) << 16, rest = bits[i] & 0x7fff;
        uint32_t word = sign | (rest >= 0x7c00 ? 0x7f800000 | rest << 13 : (rest << 13) + (112u << 23));
        float value;
        memcpy(&value, &word, 4);
        if (rest < 0x0400) value = (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
        out[i] = value;
    }
    return out;
#endif
}

// 16 numbers as float16, rounded to the nearest even.
INLINE void halves_from(f32x16 x, uint8_t *to) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    union { f32x16 all; __m256 half[2]; } in = {x};
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i *)to + i, _mm256_cvtps_ph(in.half[i], 0));
#else
    for (int i = 0; i < 16; i++) {
        float value = x[i];
        uint32_t word;
        memcpy(&word, &value, 4);
        uint32_t sign = word >> 16 & 0x8000, rest = word & 0x7fffffff;
        uint16_t bits;
        if (rest > 0x7f800000) bits = sign | 0x7e00;
        else if (rest >= 0x477ff000) bits = sign | 0x7c00;  // 65520 and more
        else if (rest < 0x38800000) {                       // below 2^-14: a multiple of 2^-24
            float least = value < 0 ? -value : value;
            least = least + 0.5f;  // its last bit is 2^-24
            memcpy(&word, &least, 4);
            bits = sign | (word - 0x3f000000);
        } else bits = sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
        memcpy(to + 2 * i, &bits, 2);
    }
#endif
}

// 16 numbers of a kind, as float32.
enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE int64_t bytes_of_number(int32_t kind) { return kind == FLOAT32 ? 4 : 2; }

INLINE f32x16 load16(const uint8_t *from, int32_t kind) {
    if (kind == FLOAT32) return floats_of((const float *)from);
    if (kind == FLOAT16) return halves_of(from);
    uint16_t bits __attribute__((vector_size(32)));
    memcpy(&bits, from, 32);
    return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

// Of fewer than 16 the rest is 0.
INLINE f32x16 load_up_to(const uint8_t *from, int64_t n, int32_t kind) {
    if (n >= 16) return load16(from, kind);
    uint8_t numbers[64] = {0};
    memcpy(numbers, from, n * bytes_of_number(kind));
    return load16(numbers, kind);
}

INLINE void store16(uint8_t *to, f32x16 x, int32_t kind) {
    if (kind == FLOAT32) {
        memcpy(to, &x, 64);
    } else if (kind == BFLOAT16) {
        u32x16 bits = (u32x16)x, is_nan = (u32x16)(x != x);
        u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        rounded = (rounded & ~is_nan) | (0x7fc0 & is_nan);
        uint16_t words __attribute__((vector_size(32))) = __builtin_convertvector(rounded, typeof(words));
        memcpy(to, &words, 32);
    } else {
        halves_from(x, to);
    }
}

INLINE void store_up_to(uint8_t *to, f32x16 x, int64_t n, int32_t kind) {
    if (n >= 16) {
        store16(to, x, kind);
        return;
    }
    uint8_t numbers[64];
    store16(numbers, x, kind);
    memcpy(to, numbers, n * bytes_of_number(kind));
}

// sums + the four products of unsigned bytes of a and signed bytes of b, of each word.
INLINE i32x16 dot_bytes(i32x16 sums, u32x16 a, int32_t b) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, _mm512_set1_epi32(b));
#elif defined(__AVX2__)
    union { u32x16 all; __m256i half[2]; } x = {a};
    union { i32x16 all; __m256i half[2]; } s = {sums};
    __m256i word = _mm256_set1_epi32(b), low = _mm256_set1_epi16(255);
    // Products of two pairs of 16 bits: of 8 bits `maddubs` would saturate.
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(word, 8), 8), odd = _mm256_srai_epi16(word, 8);
    for (int i = 0; i < 2; i++) {
        __m256i of_even = _mm256_madd_epi16(_mm256_and_si256(x.half[i], low), even);
        __m256i of_odd = _mm256_madd_epi16(_mm256_srli_epi16(x.half[i], 8), odd);
        s.half[i] = _mm256_add_epi32(s.half[i], _mm256_add_epi32(of_even, of_odd));
    }
    return s.all;
#else
    for (int i = 0; i < 4; i++) sums += (i32x16)(a >> 8 * i & 255) * (int8_t)(b >> 8 * i);
    return sums;
#endif
}

// How many words' products, each of two pairs, 16 bits hold: 8 of codes of up to 15, 4 of up to 31, by up to 127. Of 6
// bits it is 2, which is slower than one by one.
INLINE int words_together(int bits) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    return bits == 4 ? 8 : bits == 5 ? 4 : 1;
#else
    return 1;
#endif
}

// As `dot_bytes` of as many words as `words_together`, to the same bits: word i of b is b[i * stride].
INLINE i32x16 dot_words(int bits, i32x16 sums, const u32x16 *a, const int32_t *b, int stride) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    if (bits < 8) {
        union { i32x16 all; __m256i half[2]; } s = {sums};
        UNROLLED
        for (int i = 0; i < 2; i++) {
            __m256i pairs = _mm256_setzero_si256();
            UNROLLED
            for (int j = 0; j < words_together(bits); j++) {
                union { u32x16 all; __m256i half[2]; } x = {a[j]};
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(x.half[i], _mm256_set1_epi32(b[j * stride])));
            }
            s.half[i] = _mm256_add_epi32(s.half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        return s.all;
    }
#endif
    return dot_bytes(sums, a[0], b[0]);
}

// sums + the two products of bfloat16 numbers of each word.
INLINE f32x16 dot_pairs(f32x16 sums, u32x16 a, uint32_t b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
#else
    f32x16 low = (f32x16)(a << 16), high = (f32x16)(a & 0xffff0000);
    union { uint32_t bits; float number; } x = {b << 16}, y = {b & 0xffff0000};
    return fma16(high, splat(y.number), fma16(low, splat(x.number), sums));
#endif
}

INLINE f32x16 select16(i32x16 where, f32x16 a, f32x16 b) {
    return (f32x16)(((i32x16)a & where) | ((i32x16)b & ~where));
}

// e^x to 2e-7 of itself: of 2^n e^r with r within ln(2) / 2 of 0, r by a polynomial.
INLINE f32x16 exp16(f32x16 x) {
    x = select16(x < splat(-87.0f), splat(-87.0f), x);
    x = select16(x > splat(88.0f), splat(88.0f), x);
    f32x16 rounder = splat(12582912.0f), n = fma16(x, splat(1.44269504f), rounder) - rounder;
    f32x16 r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r + 1.0f);
    i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    return p * (f32x16)power;
}
