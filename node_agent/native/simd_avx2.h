// Eight lanes in AVX2, FMA and F16C. Has the operations of simd_portable.h, bit for bit.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

namespace {

struct F8 {
    __m256 v;
};
struct I8 {
    __m256i v;
};

inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 all(float a) { return {_mm256_set1_ps(a)}; }
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 max(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN
inline F8 min(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F8 abs(F8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F8 round(F8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// 2 to the power of whole numbers in -126 … 127.
inline F8 power_of_two(F8 n) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}

// a in the first `count` lanes, b in the others.
inline F8 first(int count, F8 a, F8 b) {
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
    return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(mask))};
}

inline float sum(F8 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline float largest(F8 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// Lane i becomes a[i] + a[i + D] where bit D of i is 0, else a[i - D] - a[i].
template <int D>
inline F8 butterfly(F8 a) {
    __m256 other = D == 1 ? _mm256_permute_ps(a.v, 0xB1) : D == 2 ? _mm256_permute_ps(a.v, 0x4E) : _mm256_permute2f128_ps(a.v, a.v, 1);
    constexpr int mask = D == 1 ? 0xAA : D == 2 ? 0xCC : 0xF0;
    return {_mm256_blend_ps(_mm256_add_ps(a.v, other), _mm256_sub_ps(other, a.v), mask)};
}

inline F8 load_half(const uint8_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline F8 load_int8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline F8 to_float(I8 a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline I8 subtract(I8 a, int32_t b) { return {_mm256_sub_epi32(a.v, _mm256_set1_epi32(b))}; }

// Stores 32 whole numbers in -127 … 127 and returns their sum.
inline int32_t store_int8(int8_t* p, const F8 (&a)[4]) {
    __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(a[0].v), _mm256_cvtps_epi32(a[1].v));
    __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(a[2].v), _mm256_cvtps_epi32(a[3].v));
    __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
    __m256i sums = _mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xB1)));
}

inline __m256i broadcast4(const int8_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

// Products of 8 outputs' 32 nibbles, as packed, with the same 32 inputs of R rows.
template <int R>
inline void dot_nibbles(const uint8_t* w, const int8_t* const (&x)[R], I8 (&out)[R]) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i sums[R];
    for (int j = 0; j < 4; j++) {
        __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * j));
        __m256i low = _mm256_and_si256(bytes, mask), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
        for (int r = 0; r < R; r++) {
            __m256i a = _mm256_maddubs_epi16(low, broadcast4(x[r] + 4 * j)), b = _mm256_maddubs_epi16(high, broadcast4(x[r] + 16 + 4 * j));
            // At most 8 · 2 · 15 · 127 = 30480 in 16 bits.
            sums[r] = j ? _mm256_add_epi16(sums[r], _mm256_add_epi16(a, b)) : _mm256_add_epi16(a, b);
        }
    }
    for (int r = 0; r < R; r++) out[r].v = _mm256_madd_epi16(sums[r], _mm256_set1_epi16(1));
}

// Products of 8 outputs' bytes, four inputs of all of them `stride` bytes after the last four, with the inputs of R rows.
template <int R>
inline void dot_bytes(const int8_t* w, int stride, int groups, const int8_t* const (&x)[R], I8 (&out)[R]) {
    for (int r = 0; r < R; r++) out[r].v = _mm256_setzero_si256();
    for (int j = 0; j < groups; j++) {
        __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + stride * j));
        __m256i size = _mm256_abs_epi8(bytes);
        for (int r = 0; r < R; r++) {
            // At most 2 · 128 · 127 = 32512 in 16 bits.
            __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(broadcast4(x[r] + 4 * j), bytes));
            out[r].v = _mm256_add_epi32(out[r].v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
}

}  // namespace
