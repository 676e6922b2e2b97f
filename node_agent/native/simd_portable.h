// Eight lanes in plain C++, and what each operation means.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct F8 {
    float v[8];
};
struct I8 {
    int32_t v[8];
};

template <class F>
inline F8 lanes(F f) {
    F8 result;
    for (int i = 0; i < 8; i++) result.v[i] = f(i);
    return result;
}

inline F8 load(const float* p) {
    return lanes([&](int i) { return p[i]; });
}
inline void store(float* p, F8 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F8 all(float a) {
    return lanes([&](int) { return a; });
}
inline F8 operator+(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
inline F8 operator-(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
inline F8 operator*(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
inline F8 operator/(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
inline F8 fma(F8 a, F8 b, F8 c) {
    return lanes([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline float max1(float a, float b) { return a > b ? a : b; }
inline F8 max(F8 a, F8 b) {  // b where either is NaN
    return lanes([&](int i) { return max1(a.v[i], b.v[i]); });
}
inline F8 min(F8 a, F8 b) {
    return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F8 abs(F8 a) {
    return lanes([&](int i) { return std::fabs(a.v[i]); });
}
inline F8 round(F8 a) {
    return lanes([&](int i) { return std::nearbyint(a.v[i]); });
}

// 2 to the power of whole numbers in -126 … 127.
inline F8 power_of_two(F8 n) {
    return lanes([&](int i) {
        uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    });
}

// a in the first `count` lanes, b in the others.
inline F8 first(int count, F8 a, F8 b) {
    return lanes([&](int i) { return i < count ? a.v[i] : b.v[i]; });
}

inline float sum(F8 a) {
    float x[4];
    for (int i = 0; i < 4; i++) x[i] = a.v[i] + a.v[i + 4];
    return (x[0] + x[2]) + (x[1] + x[3]);
}

inline float largest(F8 a) {
    float x[4];
    for (int i = 0; i < 4; i++) x[i] = max1(a.v[i], a.v[i + 4]);
    return max1(max1(x[0], x[2]), max1(x[1], x[3]));
}

// Lane i becomes a[i] + a[i + D] where bit D of i is 0, else a[i - D] - a[i].
template <int D>
inline F8 butterfly(F8 a) {
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

inline F8 load_half(const uint8_t* p) {
    return lanes([&](int i) {
        uint16_t half;
        std::memcpy(&half, p + 2 * i, 2);
        return half_to_float(half);
    });
}
inline F8 load_int8(const int8_t* p) {
    return lanes([&](int i) { return static_cast<float>(p[i]); });
}
inline F8 to_float(I8 a) {
    return lanes([&](int i) { return static_cast<float>(a.v[i]); });
}
inline I8 subtract(I8 a, int32_t b) {
    for (int i = 0; i < 8; i++) a.v[i] -= b;
    return a;
}

// Stores 32 whole numbers in -127 … 127 and returns their sum.
inline int32_t store_int8(int8_t* p, const F8 (&a)[4]) {
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) {
        float value = a[i / 8].v[i % 8];
        p[i] = static_cast<int8_t>(value == value ? static_cast<int32_t>(value) : -128);  // as the instruction has it for NaN
        sum += p[i];
    }
    return sum;
}

// Products of 8 outputs' 32 nibbles, as packed, with the same 32 inputs of R rows.
template <int R>
inline void dot_nibbles(const uint8_t* w, const int8_t* const (&x)[R], I8 (&out)[R]) {
    for (int r = 0; r < R; r++) {
        for (int output = 0; output < 8; output++) {
            int32_t sum = 0;
            for (int i = 0; i < 16; i++) {
                int byte = w[i / 4 * 32 + output * 4 + i % 4];
                sum += (byte & 15) * x[r][i] + (byte >> 4) * x[r][16 + i];
            }
            out[r].v[output] = sum;
        }
    }
}

// Products of 8 outputs' bytes, four inputs of all of them `stride` bytes after the last four, with the inputs of R rows.
template <int R>
inline void dot_bytes(const int8_t* w, int stride, int groups, const int8_t* const (&x)[R], I8 (&out)[R]) {
    for (int r = 0; r < R; r++) {
        for (int output = 0; output < 8; output++) {
            int32_t sum = 0;
            for (int i = 0; i < 4 * groups; i++) sum += w[i / 4 * stride + output * 4 + i % 4] * x[r][i];
            out[r].v[output] = sum;
        }
    }
}

}  // namespace
