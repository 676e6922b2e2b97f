// Sixteen lanes in pairs of AVX2 registers, with FMA and F16C. Has the operations of simd_portable.h, bit for bit.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "repeat.h"

namespace {

constexpr int ROWS_TOGETHER = 4;  // that share the unpacking of a tile
constexpr int MOST_TILES = 3;  // of outputs that are computed together for one or two rows
constexpr int MIXED_TOGETHER = 1;  // vectors of values that are mixed in one pass over the tokens

struct F16 {
    __m256 v[2];
};
struct I16 {
    __m256i v[2];
};

// Each half by itself.
template <class F>
inline F16 halves(F f) {
    return {{f(0), f(1)}};
}

inline F16 load(const float* p) {
    return halves([&](int h) { return _mm256_loadu_ps(p + 8 * h); });
}
inline void store(float* p, F16 a) {
    _mm256_storeu_ps(p, a.v[0]);
    _mm256_storeu_ps(p + 8, a.v[1]);
}
inline F16 all(float a) {
    return halves([&](int) { return _mm256_set1_ps(a); });
}
inline F16 operator+(F16 a, F16 b) {
    return halves([&](int h) { return _mm256_add_ps(a.v[h], b.v[h]); });
}
inline F16 operator-(F16 a, F16 b) {
    return halves([&](int h) { return _mm256_sub_ps(a.v[h], b.v[h]); });
}
inline F16 operator*(F16 a, F16 b) {
    return halves([&](int h) { return _mm256_mul_ps(a.v[h], b.v[h]); });
}
inline F16 operator/(F16 a, F16 b) {
    return halves([&](int h) { return _mm256_div_ps(a.v[h], b.v[h]); });
}
inline F16 fma(F16 a, F16 b, F16 c) {
    return halves([&](int h) { return _mm256_fmadd_ps(a.v[h], b.v[h], c.v[h]); });
}
inline F16 max(F16 a, F16 b) {  // b where either is NaN
    return halves([&](int h) { return _mm256_max_ps(a.v[h], b.v[h]); });
}
inline F16 min(F16 a, F16 b) {
    return halves([&](int h) { return _mm256_min_ps(a.v[h], b.v[h]); });
}
inline F16 abs(F16 a) {
    return halves([&](int h) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v[h]); });
}
inline F16 round(F16 a) {
    return halves([&](int h) { return _mm256_round_ps(a.v[h], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); });
}

// 2 to the power of whole numbers in -126 … 127.
inline F16 power_of_two(F16 n) {
    return halves([&](int h) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v[h]), _mm256_set1_epi32(127)), 23));
    });
}

// a in the first `count` lanes, b in the others.
inline F16 first(int count, F16 a, F16 b) {
    return halves([&](int h) {
        __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8 * h), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        return _mm256_blendv_ps(b.v[h], a.v[h], _mm256_castsi256_ps(mask));
    });
}

inline float sum(F16 a) {
    __m256 both = _mm256_add_ps(a.v[0], a.v[1]);
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline float largest(F16 a) {
    __m256 both = _mm256_max_ps(a.v[0], a.v[1]);
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// Lane i becomes a[i] + a[i + D] where bit D of i is 0, else a[i - D] - a[i].
template <int D>
inline F16 butterfly(F16 a) {
    if constexpr (D == 8) return {{_mm256_add_ps(a.v[0], a.v[1]), _mm256_sub_ps(a.v[0], a.v[1])}};
    return halves([&](int h) {
        __m256 other = D == 1 ? _mm256_permute_ps(a.v[h], 0xB1) : D == 2 ? _mm256_permute_ps(a.v[h], 0x4E) : _mm256_permute2f128_ps(a.v[h], a.v[h], 1);
        constexpr int mask = D == 1 ? 0xAA : D == 2 ? 0xCC : 0xF0;
        return _mm256_blend_ps(_mm256_add_ps(a.v[h], other), _mm256_sub_ps(other, a.v[h]), mask);
    });
}

inline F16 load_half(const uint8_t* p) {
    return halves([&](int h) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + h)); });
}
// Moved by seven bits, with the sign's copy below it taken out.
inline F16 load_fp8(const uint8_t* p) {
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    words = _mm256_andnot_si256(_mm256_set1_epi16(0x4000), _mm256_slli_epi16(words, 7));
    return {{_mm256_cvtph_ps(_mm256_castsi256_si128(words)), _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))}};
}
inline F16 to_float(I16 a) {
    return halves([&](int h) { return _mm256_cvtepi32_ps(a.v[h]); });
}
inline I16 subtract(I16 a, int32_t b) {
    __m256i all = _mm256_set1_epi32(b);
    return {{_mm256_sub_epi32(a.v[0], all), _mm256_sub_epi32(a.v[1], all)}};
}

// Stores 32 whole numbers in -127 … 127 and returns their sum.
inline int32_t store_int8(int8_t* p, const F16 (&a)[2]) {
    __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(a[0].v[0]), _mm256_cvtps_epi32(a[0].v[1]));
    __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(a[1].v[0]), _mm256_cvtps_epi32(a[1].v[1]));
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

// Products of 16 outputs' 32 nibbles, as packed, with the same 32 inputs of R rows. At most 8 · 2 · 15 · 127 = 30480 in 16 bits.
template <int R>
inline void dot_nibbles(const uint8_t* w, const int8_t* const (&x)[R], I16 (&out)[R]) {
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i low_half[R], high_half[R];
    repeat<4>([&](auto j) {
        const auto* bytes = reinterpret_cast<const __m256i*>(w + 64 * j);
        const __m256i a = _mm256_loadu_si256(bytes), b = _mm256_loadu_si256(bytes + 1);
        const __m256i first[] = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
        const __m256i second[] = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
        repeat<R>([&](auto r) {
            __m256i inputs = broadcast4(x[r] + 4 * j);
            __m256i one = _mm256_maddubs_epi16(first[0], inputs), other = _mm256_maddubs_epi16(first[1], inputs);
            low_half[r] = j ? _mm256_add_epi16(low_half[r], one) : one;
            high_half[r] = j ? _mm256_add_epi16(high_half[r], other) : other;
            inputs = broadcast4(x[r] + 16 + 4 * j);
            low_half[r] = _mm256_add_epi16(low_half[r], _mm256_maddubs_epi16(second[0], inputs));
            high_half[r] = _mm256_add_epi16(high_half[r], _mm256_maddubs_epi16(second[1], inputs));
        });
    });
    repeat<R>([&](auto r) {
        out[r].v[0] = _mm256_madd_epi16(low_half[r], _mm256_set1_epi16(1));
        out[r].v[1] = _mm256_madd_epi16(high_half[r], _mm256_set1_epi16(1));
    });
}

// Products of 16 outputs' bytes, four inputs of all of them `stride` bytes after the last four, with the inputs of R rows, whose
// sums are `sums`. Meanwhile 64 bytes from `next` on are fetched for each four inputs.
template <int R>
inline void dot_bytes(const int8_t* w, int stride, int groups, const int8_t* const (&x)[R], const int32_t (&)[R], const void* next, I16 (&out)[R]) {
    repeat<R>([&](auto r) { out[r].v[0] = out[r].v[1] = _mm256_setzero_si256(); });
    for (int j = 0; j < groups; j++) {
        __builtin_prefetch(static_cast<const uint8_t*>(next) + 64 * j);
        repeat<2>([&](auto h) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + stride * j + 32 * h));
            const __m256i size = _mm256_abs_epi8(bytes);
            repeat<R>([&](auto r) {
                // At most 2 · 128 · 127 = 32512 in 16 bits.
                __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(broadcast4(x[r] + 4 * j), bytes));
                out[r].v[h] = _mm256_add_epi32(out[r].v[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            });
        });
    }
}

// Sums of weights times the values of 16 dimensions: of each, those of even and of odd pairs of tokens. The weights lie as they are, in 16 bits.
struct Mix {
    __m256i v[4];
};

inline Mix no_mix() { return {}; }

// Four tokens more.
inline Mix add_products(Mix sums, const uint8_t* weights, int token, const int8_t* values) {
    int64_t four;
    __builtin_memcpy(&four, weights + 2 * token, 8);
    repeat<4>([&](auto i) {
        const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + 16 * i)));
        sums.v[i] = _mm256_add_epi32(sums.v[i], _mm256_madd_epi16(bytes, _mm256_set1_epi64x(four)));
    });
    return sums;
}

inline I16 total(Mix sums) {
    I16 all;
    for (int h = 0; h < 2; h++) all.v[h] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums.v[2 * h], sums.v[2 * h + 1]), 0xD8);
    return all;
}

// Whole numbers up to LARGEST_WEIGHT, of 16 tokens.
inline void store_weights(uint8_t* weights, int token, F16 a) {
    __m256i whole = _mm256_packs_epi32(_mm256_cvtps_epi32(a.v[0]), _mm256_cvtps_epi32(a.v[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + 2 * token), _mm256_permute4x64_epi64(whole, 0xD8));
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
    return {{_mm256_cvtepi16_epi32(_mm256_castsi256_si128(sums)), _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sums, 1))}};
}
inline F16 load_bytes(const uint8_t* p) {
    return halves([&](int h) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * h)))); });
}

inline int32_t sum_int8(const int8_t* p, int size) {
    int32_t total = 0;
    for (int i = 0; i < size; i++) total += p[i];
    return total;
}

}  // namespace
