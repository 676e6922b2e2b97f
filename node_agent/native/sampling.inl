// What sampling does to a whole row of logits; included by each tier. Plain loops that a compiler makes vectors of, in an order of
// additions that does not depend on their width.

// Writes the largest of each 64 logits to `tops`; false where one is not finite.
bool scan(const float* x, int size, float* tops) {
    F16 wrong = all(0.0f);  // zero times what is not finite is not a number
    int at = 0;
    for (; at + SCAN <= size; at += SCAN) {
        F16 top = load(x + at);
        for (int i = 0; i < SCAN; i += 16) {
            F16 value = load(x + at + i);
            top = max(top, value);
            wrong = fma(value, all(0.0f), wrong);
        }
        *tops++ = largest(top);
    }
    float lanes[16], rest = 0;
    store(lanes, wrong);
    for (float lane : lanes) rest += lane;
    if (at < size) *tops = x[at];
    for (; at < size; at++) {
        *tops = x[at] > *tops ? x[at] : *tops;
        rest += x[at] * 0.0f;
    }
    return rest == 0;
}

// To fp64, filled up to a multiple of 64 with what nothing draws.
void widen(const float* __restrict x, int size, double* __restrict z) {
    for (int i = 0; i < size; i++) z[i] = static_cast<double>(x[i]);
    for (int i = size; i % SCAN; i++) z[i] = -__builtin_inf();
}

// Divides by the temperature in place, and writes the largest of each 64 to `tops`. `size` is a multiple of 64.
void temper(double* __restrict z, int size, double temperature, double* __restrict tops) {
    for (int at = 0; at < size; at += SCAN, tops++) {
        double lane[8];
        for (int j = 0; j < 8; j++) lane[j] = -__builtin_inf();
        for (int i = at; i < at + SCAN; i += 8) {
            for (int j = 0; j < 8; j++) {
                double value = z[i + j] / temperature;
                z[i + j] = value;
                lane[j] = value > lane[j] ? value : lane[j];
            }
        }
        *tops = lane[0];
        for (double one : lane) *tops = one > *tops ? one : *tops;
    }
}

// exp(z - top) of 64 values; returns their sum. Relative error below 1e-15; what is below e^-700 counts as that.
double weigh(const double* __restrict z, double top, double* __restrict weights) {
    constexpr double SHIFT = 6755399441055744.0;  // 1.5 · 2^52: adding it leaves the nearest whole number in the lowest bits
    constexpr double COEFFICIENTS[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
    double sums[8] = {};
    for (int i = 0; i < SCAN; i += 8) {
        for (int j = 0; j < 8; j++) {
            double x = z[i + j] - top;
            x = x > -700.0 ? x : -700.0;
            double shifted = x * 1.4426950408889634 + SHIFT, n = shifted - SHIFT;
            double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
            double p = 1.0 / 479001600;
            for (double c : COEFFICIENTS) p = p * r + c;
            int64_t exponent, bits;
            __builtin_memcpy(&exponent, &shifted, 8);
            __builtin_memcpy(&bits, &p, 8);
            bits += static_cast<int64_t>(static_cast<uint64_t>(exponent) << 52);
            __builtin_memcpy(&p, &bits, 8);
            weights[i + j] = p;
            sums[j] += p;
        }
    }
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}
