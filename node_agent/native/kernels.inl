// The kernels, written once over eight lanes; a tier includes this after its lanes. Nothing here may come from the standard
// library's templates: the linker could keep this tier's copy of one for the whole program.

#include "kernels.h"

namespace {

using namespace decodefleet;

// Relative error below 2e-7; 1 for 0. Inputs beyond ±87 count as that.
inline F8 exponential(F8 x) {
    x = min(max(x, all(-87.0f)), all(87.0f));
    F8 n = round(x * all(1.44269504f));
    F8 r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    constexpr float COEFFICIENTS[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    F8 p = all(1.0f / 5040);
    for (float c : COEFFICIENTS) p = fma(p, r, all(c));
    return p * power_of_two(n);
}

inline float exponential(float x) {
    float lanes[8];
    store(lanes, exponential(all(x)));
    return lanes[0];
}

template <int FORMAT, int R>
void tile(const uint8_t* w, int blocks, const Activations& x, int row, F8 (&acc)[R]) {
    const int8_t* values[R];
    const float *scales[R], *weighted_sums[R];
    const int32_t* sums[R];
    for (int r = 0; r < R; r++) {
        size_t at = static_cast<size_t>(row + r) * blocks;
        values[r] = x.values + at * BLOCK;
        scales[r] = x.scales + at;
        weighted_sums[r] = x.weighted_sums + at;
        sums[r] = x.sums + at;
        acc[r] = all(0.0f);
    }
    for (int b = 0; b < blocks; b++) {
        I8 dot[R];
        if constexpr (FORMAT == DF_Q4_0 || FORMAT == DF_Q4_1) {
            dot_nibbles<R>(w + (FORMAT == DF_Q4_1 ? 32 : 16), values, dot);
        } else {
            dot_bytes<R>(reinterpret_cast<const int8_t*>(w) + (FORMAT == DF_Q8_0 ? 16 : 0), 32, 8, values, dot);
        }
        for (int r = 0; r < R; r++) {
            F8 scale = all(scales[r][b]);
            if constexpr (FORMAT == DF_Q4_0) dot[r] = subtract(dot[r], 8 * sums[r][b]);
            if constexpr (FORMAT != DF_INT8_ROTATED) scale = load_half(w) * scale;
            acc[r] = fma(to_float(dot[r]), scale, acc[r]);
            if constexpr (FORMAT == DF_Q4_1) acc[r] = fma(load_half(w + 16), all(weighted_sums[r][b]), acc[r]);
            values[r] += BLOCK;
        }
        w += FORMAT == DF_Q4_0 ? 144 : FORMAT == DF_Q4_1 ? 160 : FORMAT == DF_Q8_0 ? 272 : 256;
    }
}

template <int FORMAT, int R>
void tile_rows(const df_linear& w, int tile_index, const Activations& x, int row, float* to, int stride, bool add) {
    int blocks = w.inputs / BLOCK, at = tile_index * TILE, outputs = w.outputs - at < TILE ? w.outputs - at : TILE;
    F8 acc[R];
    tile<FORMAT, R>(w.data + static_cast<size_t>(tile_index) * blocks * block_bytes(FORMAT), blocks, x, row, acc);
    for (int r = 0; r < R; r++, to += stride) {
        F8 y = acc[r];
        if constexpr (FORMAT == DF_INT8_ROTATED) y = y * load(w.output_scale + at);
        if (outputs == TILE) {
            if (w.bias) y = y + load(w.bias + at);
            store(to, add ? load(to) + y : y);
        } else {
            float lanes[TILE];
            store(lanes, y);
            for (int i = 0; i < outputs; i++) {
                float one = w.bias ? lanes[i] + w.bias[at + i] : lanes[i];
                to[i] = add ? to[i] + one : one;
            }
        }
    }
}

template <int FORMAT>
void linear_of(const df_linear& w, int first_tile, int last_tile, const Activations& x, int first_row, int last_row, float* out, int stride, bool add) {
    for (int t = first_tile; t < last_tile; t++, out += TILE) {
        int row = first_row;
        auto to = [&] { return out + static_cast<size_t>(row - first_row) * stride; };
        for (; row + 4 <= last_row; row += 4) tile_rows<FORMAT, 4>(w, t, x, row, to(), stride, add);
        if (last_row - row == 3) tile_rows<FORMAT, 3>(w, t, x, row, to(), stride, add);
        if (last_row - row == 2) tile_rows<FORMAT, 2>(w, t, x, row, to(), stride, add);
        if (last_row - row == 1) tile_rows<FORMAT, 1>(w, t, x, row, to(), stride, add);
    }
}

void linear(const df_linear& w, int first_tile, int last_tile, const Activations& x, int first_row, int last_row, float* out, int stride, bool add) {
    auto* run = w.format == DF_Q4_0   ? linear_of<DF_Q4_0>
                : w.format == DF_Q4_1 ? linear_of<DF_Q4_1>
                : w.format == DF_Q8_0 ? linear_of<DF_Q8_0>
                                      : linear_of<DF_INT8_ROTATED>;
    run(w, first_tile, last_tile, x, first_row, last_row, out, stride, add);
}

template <int WIDTH>
inline void hadamard(float* x) {
    constexpr int N = WIDTH / 8;
    F8 a[N];
    for (int i = 0; i < N; i++) a[i] = butterfly<4>(butterfly<2>(butterfly<1>(load(x + 8 * i))));
    for (int step = 1; step < N; step *= 2) {
        for (int i = 0; i < N; i++) {
            if (i & step) continue;
            F8 low = a[i], high = a[i + step];
            a[i] = low + high;
            a[i + step] = low - high;
        }
    }
    for (int i = 0; i < N; i++) store(x + 8 * i, a[i] * all(WIDTH == 64 ? 0.125f : 0.17677669529f));
}

// The normalised Hadamard transform, its own inverse, of each `width` (32 or 64) values.
void rotate(float* x, int size, int width) {
    for (int i = 0; i < size; i += width) width == 64 ? hadamard<64>(x + i) : hadamard<32>(x + i);
}

// Eight outputs of a tile hold four bytes each of every four inputs.
inline int packed_byte(const uint8_t* quants, int output, int input) { return quants[input / 4 * 32 + output * 4 + input % 4]; }

void embed(const df_linear& w, int token, float* out) {
    int blocks = w.inputs / BLOCK, lane = token % TILE;
    const uint8_t* block = w.data + static_cast<size_t>(token / TILE) * blocks * block_bytes(w.format);
    for (int b = 0; b < blocks; b++, block += block_bytes(w.format), out += BLOCK) {
        float scale[TILE], minimum[TILE] = {};
        if (w.format == DF_INT8_ROTATED) {
            scale[lane] = w.output_scale[token];
        } else {
            store(scale, load_half(block));
        }
        if (w.format == DF_Q4_1) store(minimum, load_half(block + 16));
        const uint8_t* quants = block + (w.format == DF_Q4_1 ? 32 : w.format == DF_INT8_ROTATED ? 0 : 16);
        for (int i = 0; i < BLOCK; i++) {
            int value;
            if (w.format == DF_Q4_0 || w.format == DF_Q4_1) {
                int byte = packed_byte(quants, lane, i % 16);
                value = (i < 16 ? byte & 15 : byte >> 4) - (w.format == DF_Q4_0 ? 8 : 0);
            } else {
                value = static_cast<int8_t>(packed_byte(quants, lane, i));
            }
            out[i] = static_cast<float>(value) * scale[lane] + minimum[lane];
        }
    }
    if (int width = rotation_of(w)) rotate(out - w.inputs, w.inputs, width);
}

void norm(const float* x, const float* weight, int size, float epsilon, float* out) {
    F8 squares = all(0.0f);
    for (int i = 0; i < size; i += 8) squares = fma(load(x + i), load(x + i), squares);
    F8 factor = all(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + epsilon));
    for (int i = 0; i < size; i += 8) store(out + i, load(x + i) * factor * load(weight + i));
}

inline F8 quantized(F8 x, F8 inverse) { return round(min(max(x * inverse, all(-127.0f)), all(127.0f))); }

void quantize(float* x, int size, int rotation, const Activations& out, int row, int start) {
    if (rotation) rotate(x, size, rotation);
    size_t at = static_cast<size_t>(row) * out.inputs + start;
    for (int i = 0; i < size; i += BLOCK, at += BLOCK) {
        F8 a[4], top = all(0.0f);
        for (int j = 0; j < 4; j++) {
            a[j] = load(x + i + 8 * j);
            top = max(top, abs(a[j]));
        }
        float size_of = largest(top), scale = size_of / 127.0f;
        F8 inverse = all(size_of > 0 ? 127.0f / size_of : 0.0f);
        for (int j = 0; j < 4; j++) a[j] = quantized(a[j], inverse);
        int32_t total = store_int8(out.values + at, a);
        out.scales[at / BLOCK] = scale;
        out.sums[at / BLOCK] = total;
        out.weighted_sums[at / BLOCK] = scale * static_cast<float>(total);
    }
}

void swiglu(const float* gate, const float* up, int size, float* out) {
    for (int i = 0; i < size; i += 8) {
        F8 g = load(gate + i);
        store(out + i, g / (all(1.0f) + exponential(all(0.0f) - g)) * load(up + i));
    }
}

void rope(float* head, const float* cosine, const float* sine, int dim) {
    for (int i = 0; i < dim / 2; i += 8) {
        F8 low = load(head + i), high = load(head + dim / 2 + i), c = load(cosine + i), s = load(sine + i);
        store(head + i, low * c - high * s);
        store(head + dim / 2 + i, high * c + low * s);
    }
}

float quantize_head(const float* x, int dim, int8_t* out) {
    F8 top = all(0.0f);
    for (int i = 0; i < dim; i += 8) top = max(top, abs(load(x + i)));
    float size_of = largest(top);
    F8 inverse = all(size_of > 0 ? 127.0f / size_of : 0.0f);
    for (int i = 0; i < dim; i += BLOCK) {
        F8 a[4];
        for (int j = 0; j < 4; j++) a[j] = quantized(load(x + i + 8 * j), inverse);
        store_int8(out + i, a);
    }
    return size_of / 127.0f;
}

#include "attention.inl"
#include "selection.inl"

}  // namespace

#define DECODEFLEET_KERNELS(NAME) \
    {NAME, linear, embed, norm, quantize, swiglu, rope, rotate, quantize_head, attend_int8, attend_fp32, combine, score_summary}
