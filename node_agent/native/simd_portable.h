// Sixteen lanes in plain C++, and what each operation means.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "repeat.h"

namespace {

constexpr int ROWS_TOGETHER = 4;  // that share the unpacking of a tile
constexpr int MOST_TILES = 1;  // of outputs that are computed together for one or two rows
constexpr int MIXED_TOGETHER = 2;  // vectors of values that are mixed in one pass over the tokens

struct F16 {
    float v[16];
};
struct I16 {
    int32_t v[16];
};

template <class F>
inline F16 lanes(F f) {
    F16 result;
    for (int i = 0; i < 16; i++) result.v[i] = f(i);
    return result;
}

inline F16 load(const float* p) {
    return lanes([&](int i) { return p[i]; });
}
inline void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 all(float a) {
    return lanes([&](int) { return a; });
}
inline F16 operator+(F16 a, F16 b) {
    return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline F16 operator-(F16 a, F16 b) {
    return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F16 operator*(F16 a, F16 b) {
    return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline F16 operator/(F16 a, F16 b) {
    return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline F16 fma(F16 a, F16 b, F16 c) {
    return lanes([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline float max1(float a, float b) { return a > b ? a : b; }
inline F16 max(F16 a, F16 b) {  // b where either is NaN
    return lanes([&](int i) { return max1(a.v[i], b.v[i]); });
}
inline F16 min(F16 a, F16 b) {
    return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F16 abs(F16 a) {
    return lanes([&](int i) { return std::fabs(a.v[i]); });
}
inline F16 round(F16 a) {
    return lanes([&](int i) { return std::nearbyint(a.v[i]); });
}

// 2 to the power of whole numbers in -126 … 127.
inline F16 power_of_two(F16 n) {
    return lanes([&](int i) {
        uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    });
}

// a in the first `count` lanes, b in the others.
inline F16 first(int count, F16 a, F16 b) {
    return lanes([&](int i) { return i < count ? a.v[i] : b.v[i]; });
}

inline float sum(F16 a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
    return a.v[0];
}

inline float largest(F16 a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = max1(a.v[i], a.v[i + half]);
    return a.v[0];
}

// Lane i becomes a[i] + a[i + D] where bit D of i is 0, else a[i - D] - a[i].
template <int D>
inline F16 butterfly(F16 a) {
    return lanes([&](int i) { return i & D ? a.v[i - D] - a.v[i] : a.v[i] + a.v[i + D]; });
}

inline float half_to_float(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 0) {  // zero or subnormal
        float value = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -value : value;
    }
    uint32_t bits = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | mantissa << 13;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline F16 load_half(const uint8_t* p) {
    return lanes([&](int i) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, 2);
        return half_to_float(half);
    });
}
// e4m3 numbers times 2^-8: with their bits moved they are halves, subnormal ones too. The two bytes of NaN, which are never stored, count as 480.
inline F16 load_fp8(const uint8_t* p) {
    return lanes([&](int i) { return half_to_float(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7)); });
}
inline F16 to_float(I16 a) {
    return lanes([&](int i) { return static_cast<float>(a.v[i]); });
}
inline I16 subtract(I16 a, int32_t b) {
    for (int i = 0; i < 16; i++) a.v[i] -= b;
    return a;
}

// Stores 32 whole numbers in -127 … 127 and returns their sum.
inline int32_t store_int8(int8_t* p, const F16 (&a)[2]) {
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) {
        float value = a[i / 16].v[i % 16];
        p[i] = static_cast<int8_t>(value == value ? static_cast<int32_t>(value) : -128);  // as the instruction has it for NaN
        sum += p[i];
    }
    return sum;
}

// Products of 16 outputs' 32 nibbles, as packed, with the same 32 inputs of R rows.
template <int R>
inline void dot_nibbles(const uint8_t* w, const int8_t* const (&x)[R], I16 (&out)[R]) {
    for (int r = 0; r < R; r++) {
        for (int output = 0; output < 16; output++) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) {
                int byte = w[i / 4 * 64 + output * 4 + i % 4];
                sum += (byte & 15) * x[r][i] + (byte >> 4) * x[r][16 + i];
            }
            out[r].v[output] = sum;
        }
    }
}

// Products of 16 outputs' bytes, four inputs of all of them `stride` bytes after the last four, with the inputs of R rows, whose
// sums are `sums`. Meanwhile 64 bytes from `next` on are fetched for each four inputs.
template <int R>
inline void dot_bytes(const int8_t* w, int stride, int groups, const int8_t* const (&x)[R], const int32_t (&)[R], const void*, I16 (&out)[R]) {
    for (int r = 0; r < R; r++) {
        for (int output = 0; output < 16; output++) {
            int32_t sum = 0;
            for (int i = 0; i < 4 * groups; i++) sum += w[i / 4 * stride + output * 4 + i % 4] * x[r][i];
            out[r].v[output] = sum;
        }
    }
}

// Sums of weights times the values of 16 dimensions. The weights lie as they are, in 16 bits.
using Mix = I16;

inline Mix no_mix() { return {}; }

// Four tokens more.
inline Mix add_products(Mix sums, const uint8_t* weights, int token, const int8_t* values) {
    int16_t four[4];
    __builtin_memcpy(four, weights + 2 * token, 8);
    for (int i = 0; i < 64; i++) sums.v[i / 4] += four[i % 4] * values[i];
    return sums;
}

inline I16 total(Mix sums) { return sums; }

// Whole numbers up to LARGEST_WEIGHT, of 16 tokens.
inline void store_weights(uint8_t* weights, int token, F16 a) {
    for (int i = 0; i < 16; i++) {
        const auto whole = static_cast<int16_t>(a.v[i]);
        __builtin_memcpy(weights + 2 * (token + i), &whole, 2);
    }
}

// For each lane, entries of two tables of 16 for each of its bytes, which are 16 apart; the low four bits count in the first one. Sums of 16 bits.
inline I16 sum_signs(const int8_t* tables, const uint8_t* signs, int bytes) {
    I16 sums{};
    for (int i = 0; i < 16 * bytes; i++) {
        const int8_t* both = tables + i / 16 * 32;
        sums.v[i % 16] += both[signs[i] & 15] + both[16 + (signs[i] >> 4)];
    }
    return sums;
}
inline F16 load_bytes(const uint8_t* p) {
    return lanes([&](int i) { return static_cast<float>(p[i]); });
}

inline int32_t sum_int8(const int8_t* p, int size) {
    int32_t total = 0;
    for (int i = 0; i < size; i++) total += p[i];
    return total;
}

}  // namespace
