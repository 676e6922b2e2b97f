// Loops that are written out, so that the compiler keeps small arrays in registers.
#pragma once

namespace {

template <int N>
struct Number {
    constexpr operator int() const { return N; }
};

// f(0), f(1) … f(N - 1), each number a constant.
template <int N, int FIRST = 0, class F>
__attribute__((always_inline)) inline void repeat(F&& f) {
    if constexpr (FIRST < N) {
        f(Number<FIRST>{});
        repeat<N, FIRST + 1>(f);
    }
}

}  // namespace
