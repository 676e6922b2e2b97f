// Sixteen lanes in AVX512 with VNNI. Has the operations of simd_portable.h, bit for bit.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "repeat.h"

namespace {

constexpr int ROWS_TOGETHER = 8;  // that share the unpacking of a tile: accumulators, products and weights fill the registers
constexpr int MOST_TILES = 4;  // of outputs that are computed together for one or two rows
constexpr int MIXED_TOGETHER = 4;  // vectors of values that are mixed in one pass over the tokens

struct F16 {
    __m512 v;
};
struct I16 {
    __m512i v;
};

inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 all(float a) { return {_mm512_set1_ps(a)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
inline F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// 2 to the power of whole numbers in -126 … 127.
inline F16 power_of_two(F16 n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}

// a in the first `count` lanes, b in the others.
inline F16 first(int count, F16 a, F16 b) {
    __mmask16 mask = count >= 16 ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1 << count) - 1);
    return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}

inline float sum(F16 a) {
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

inline float largest(F16 a) {
    __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// Lane i becomes a[i] + a[i + D] where bit D of i is 0, else a[i - D] - a[i].
template <int D>
inline F16 butterfly(F16 a) {
    __m512 other = D == 1   ? _mm512_permute_ps(a.v, 0xB1)
                   : D == 2 ? _mm512_permute_ps(a.v, 0x4E)
                   : D == 4 ? _mm512_shuffle_f32x4(a.v, a.v, 0xB1)
                            : _mm512_shuffle_f32x4(a.v, a.v, 0x4E);
    constexpr __mmask16 mask = D == 1 ? 0xAAAA : D == 2 ? 0xCCCC : D == 4 ? 0xF0F0 : 0xFF00;
    return {_mm512_mask_sub_ps(_mm512_add_ps(a.v, other), mask, other, a.v)};
}

inline F16 load_half(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
// Moved by seven bits, with the sign's copy below it taken out.
inline F16 load_fp8(const uint8_t* p) {
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtph_ps(_mm256_andnot_si256(_mm256_set1_epi16(0x4000), _mm256_slli_epi16(words, 7)))};
}
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 subtract(I16 a, int32_t b) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(b))}; }

// Stores 32 whole numbers in -127 … 127 and returns their sum.
inline int32_t store_int8(int8_t* p, const F16 (&a)[2]) {
    __m512i low = _mm512_cvtps_epi32(a[0].v), high = _mm512_cvtps_epi32(a[1].v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtsepi32_epi8(high));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
}

inline __m512i broadcast4(const int8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

// Products of 16 outputs' 32 nibbles, as packed, with the same 32 inputs of R rows.
template <int R>
inline void dot_nibbles(const uint8_t* w, const int8_t* const (&x)[R], I16 (&out)[R]) {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i sums[R];
    repeat<R>([&](auto r) { sums[r] = _mm512_setzero_si512(); });
    repeat<4>([&](auto j) {
        __m512i bytes = _mm512_loadu_si512(w + 64 * j);
        __m512i low = _mm512_and_si512(bytes, mask), high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
        repeat<R>([&](auto r) {
            sums[r] = _mm512_dpbusd_epi32(sums[r], low, broadcast4(x[r] + 4 * j));
            sums[r] = _mm512_dpbusd_epi32(sums[r], high, broadcast4(x[r] + 16 + 4 * j));
        });
    });
    repeat<R>([&](auto r) { out[r].v = sums[r]; });
}

// Products of 16 outputs' bytes, four inputs of all of them `stride` bytes after the last four, with the inputs of R rows, whose
// sums are `sums`. Meanwhile 64 bytes from `next` on are fetched for each four inputs.
template <int R>
inline void dot_bytes(const int8_t* w, int stride, int groups, const int8_t* const (&x)[R], const int32_t (&sums)[R], const void* next, I16 (&out)[R]) {
    const __m512i offset = _mm512_set1_epi8(-128);
    __m512i acc[R];
    repeat<R>([&](auto r) { acc[r] = _mm512_set1_epi32(-128 * sums[r]); });
    for (int j = 0; j < groups; j++) {
        __builtin_prefetch(static_cast<const uint8_t*>(next) + 64 * j);
        // The instruction takes one of the two as unsigned: the weight plus 128.
        __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(w + stride * j), offset);
        repeat<R>([&](auto r) { acc[r] = _mm512_dpbusd_epi32(acc[r], bytes, broadcast4(x[r] + 4 * j)); });
    }
    repeat<R>([&](auto r) { out[r].v = acc[r]; });
}

// Sums of weights times the values of 16 dimensions. The weights lie in two planes: the upper seven bits of a partition's, and the lower.
struct Mix {
    __m512i high, low;
};

inline Mix no_mix() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }

// Four tokens more.
inline Mix add_products(Mix sums, const uint8_t* weights, int token, const int8_t* values) {
    const auto* four = reinterpret_cast<const int8_t*>(weights + token);
    const __m512i bytes = _mm512_loadu_si512(values);
    return {_mm512_dpbusd_epi32(sums.high, broadcast4(four), bytes), _mm512_dpbusd_epi32(sums.low, broadcast4(four + decodefleet::PARTITION), bytes)};
}

inline I16 total(Mix sums) { return {_mm512_add_epi32(_mm512_slli_epi32(sums.high, 7), sums.low)}; }

// Whole numbers up to LARGEST_WEIGHT, of 16 tokens.
inline void store_weights(uint8_t* weights, int token, F16 a) {
    __m512i whole = _mm512_cvtps_epi32(a.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(weights + token), _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 7)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(weights + decodefleet::PARTITION + token), _mm512_cvtepi32_epi8(_mm512_and_si512(whole, _mm512_set1_epi32(127))));
}

// For each lane, entries of two tables of 16 for each of its bytes, which are 16 apart; the low four bits count in the first one. Sums of 16 bits.
inline I16 sum_signs(const int8_t* tables, const uint8_t* signs, int bytes) {
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < bytes; i++) {
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(signs) + i), four = _mm_set1_epi8(15);
        const __m128i* table = reinterpret_cast<const __m128i*>(tables) + 2 * i;
        const __m128i low = _mm_shuffle_epi8(_mm_loadu_si128(table), _mm_and_si128(both, four));
        const __m128i high = _mm_shuffle_epi8(_mm_loadu_si128(table + 1), _mm_and_si128(_mm_srli_epi16(both, 4), four));
        sums = _mm256_add_epi16(sums, _mm256_add_epi16(_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)));
    }
    return {_mm512_cvtepi16_epi32(sums)};
}
inline F16 load_bytes(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))}; }

inline int32_t sum_int8(const int8_t* p, int size) {
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < size; i += 64) total = _mm512_dpbusd_epi32(total, _mm512_set1_epi8(1), _mm512_loadu_si512(p + i));
    return _mm512_reduce_add_epi32(total);
}

}  // namespace
