// The kernels, written once over sixteen lanes; a tier includes this after its lanes. Nothing here may come from the standard
// library's templates: the linker could keep this tier's copy of one for the whole program.

#include "kernels.h"
#include "repeat.h"

namespace {

using namespace decodefleet;

// Relative error below 2e-7; 1 for 0. Inputs beyond ±87 count as that.
inline F16 exponential(F16 x) {
    x = min(max(x, all(-87.0f)), all(87.0f));
    F16 n = round(x * all(1.44269504f));
    F16 r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    constexpr float COEFFICIENTS[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    F16 p = all(1.0f / 5040);
    for (float c : COEFFICIENTS) p = fma(p, r, all(c));
    return p * power_of_two(n);
}

inline void nothing() {}

inline float exponential(float x) {
    float lanes[16];
    store(lanes, exponential(all(x)));
    return lanes[0];
}

template <int FORMAT>
inline const uint8_t* tile_data(const df_linear& w, int tile) {
    return w.data + static_cast<size_t>(tile) * (w.inputs / BLOCK) * block_bytes(FORMAT);
}

// Adds a block's products of one row to what the blocks before it gave.
template <int FORMAT>
inline F16 add_block(F16 acc, I16 dot, const uint8_t* w, float scale, float weighted_sum) {
    F16 factor = all(scale);
    if constexpr (FORMAT != DF_INT8_ROTATED) factor = load_half(w) * factor;
    acc = fma(to_float(dot), factor, acc);
    if constexpr (FORMAT == DF_Q4_1) acc = fma(load_half(w + 2 * TILE), all(weighted_sum), acc);
    return acc;
}

// Bias, and the place where a row's outputs of a tile go.
template <int FORMAT>
inline void finish_tile(const df_linear& w, int tile, F16 y, float* to, bool add) {
    int at = tile * TILE, outputs = w.outputs - at < TILE ? w.outputs - at : TILE;
    if constexpr (FORMAT == DF_INT8_ROTATED) y = y * load(w.output_scale + at);
    if (outputs == TILE) {
        if (w.bias) y = y + load(w.bias + at);
        store(to, add ? load(to) + y : y);
        return;
    }
    float lanes[TILE];
    store(lanes, y);
    for (int i = 0; i < outputs; i++) {
        float one = w.bias ? lanes[i] + w.bias[at + i] : lanes[i];
        to[i] = add ? to[i] + one : one;
    }
}

// Some rows and a few tiles: several tiles are as many streams of memory, which a processor fetches faster than one.
template <int FORMAT, int R, int T>
void tile_rows(const df_linear& w, int tile, const Activations& x, int row, float* to, int stride, bool add) {
    const int blocks = w.inputs / BLOCK;
    const size_t tile_bytes = static_cast<size_t>(blocks) * block_bytes(FORMAT);
    const uint8_t* data = tile_data<FORMAT>(w, tile);
    const int8_t* values[R];
    const float *scales[R], *weighted_sums[R];
    const int32_t* sums[R];
    F16 acc[T][R];
    repeat<R>([&](auto r) {
        size_t at = x.first_block(row + r);
        values[r] = x.values + static_cast<size_t>(row + r) * w.inputs;
        scales[r] = x.scales + at;
        weighted_sums[r] = x.weighted_sums + at;
        sums[r] = x.sums + at;
        repeat<T>([&](auto t) { acc[t][r] = all(0.0f); });
    });
    for (int b = 0; b < blocks; b++, data += block_bytes(FORMAT)) {
        int32_t totals[R];
        repeat<R>([&](auto r) { totals[r] = sums[r][16 * b]; });
        repeat<T>([&](auto t) {
            const uint8_t *block = data + t * tile_bytes, *quants = block + header_bytes(FORMAT);
            if constexpr (T > 1) {  // with so few rows memory is what takes the time: the next tiles come while these are computed
                for (int i = 0; i < block_bytes(FORMAT); i += 64) __builtin_prefetch(block + T * tile_bytes + i);
            }
            I16 dot[R];
            if constexpr (FORMAT == DF_Q4_0 || FORMAT == DF_Q4_1) {
                dot_nibbles<R>(quants, values, dot);
            } else {
                dot_bytes<R>(reinterpret_cast<const int8_t*>(quants), 4 * TILE, BLOCK / 4, values, totals, quants, dot);
            }
            repeat<R>([&](auto r) {
                if constexpr (FORMAT == DF_Q4_0) dot[r] = subtract(dot[r], 8 * totals[r]);
                acc[t][r] = add_block<FORMAT>(acc[t][r], dot[r], block, scales[r][16 * b], weighted_sums[r][16 * b]);
            });
        });
        repeat<R>([&](auto r) { values[r] += BLOCK; });
    }
    repeat<T>([&](auto t) {
        repeat<R>([&](auto r) { finish_tile<FORMAT>(w, tile + t, acc[t][r], to + static_cast<size_t>(r) * stride + t * TILE, add); });
    });
}

// Tiles that go together with so many rows: their accumulators and products must fit into the registers.
constexpr int tiles_together(int rows) { return rows <= 2 ? MOST_TILES : rows <= 4 && MOST_TILES > 1 ? 2 : 1; }

template <int FORMAT, int R, int T>
void some_tiles(int tiles, const df_linear& w, int tile, const Activations& x, int row, float* to, int stride, bool add) {
    if constexpr (T > 1) {
        if (tiles < T) return some_tiles<FORMAT, R, T - 1>(tiles, w, tile, x, row, to, stride, add);
    }
    tile_rows<FORMAT, R, T>(w, tile, x, row, to, stride, add);
}

// At most R rows.
template <int FORMAT, int R>
void some_rows(int rows, int tiles, const df_linear& w, int tile, const Activations& x, int row, float* to, int stride, bool add) {
    if constexpr (R > 1) {
        if (rows < R) return some_rows<FORMAT, R - 1>(rows, tiles, w, tile, x, row, to, stride, add);
    }
    some_tiles<FORMAT, R, tiles_together(R)>(tiles, w, tile, x, row, to, stride, add);
}

template <int FORMAT>
void linear_of(const df_linear& w, int first_tile, int last_tile, const Activations& x, int first_row, int last_row, float* out, int stride, bool add) {
    const int most = tiles_together(last_row - first_row);
    for (int t = first_tile, tiles; t < last_tile; t += tiles, out += tiles * TILE) {
        tiles = last_tile - t < most ? last_tile - t : most;
        float* to = out;
        for (int row = first_row, rows; row < last_row; row += rows, to += static_cast<size_t>(rows) * stride) {
            rows = last_row - row < ROWS_TOGETHER ? last_row - row : ROWS_TOGETHER;
            some_rows<FORMAT, ROWS_TOGETHER>(rows, tiles, w, t, x, row, to, stride, add);
        }
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
    constexpr int N = WIDTH / 16;
    F16 a[N];
    for (int i = 0; i < N; i++) a[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + 16 * i)))));
    for (int step = 1; step < N; step *= 2) {
        for (int i = 0; i < N; i++) {
            if (i & step) continue;
            F16 low = a[i], high = a[i + step];
            a[i] = low + high;
            a[i + step] = low - high;
        }
    }
    for (int i = 0; i < N; i++) store(x + 16 * i, a[i] * all(WIDTH == 64 ? 0.125f : 0.17677669529f));
}

// The normalised Hadamard transform, its own inverse, of each `width` (32 or 64) values.
void rotate(float* x, int size, int width) {
    for (int i = 0; i < size; i += width) width == 64 ? hadamard<64>(x + i) : hadamard<32>(x + i);
}

// Sixteen outputs of a tile hold four bytes each of every four inputs.
inline int packed_byte(const uint8_t* quants, int output, int input) { return quants[input / 4 * 4 * TILE + output * 4 + input % 4]; }

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
        if (w.format == DF_Q4_1) store(minimum, load_half(block + 2 * TILE));
        const uint8_t* quants = block + header_bytes(w.format);
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
    F16 squares = all(0.0f);
    for (int i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
    F16 factor = all(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + epsilon));
    for (int i = 0; i < size; i += 16) store(out + i, load(x + i) * factor * load(weight + i));
}

inline F16 quantized(F16 x, F16 inverse) { return round(min(max(x * inverse, all(-127.0f)), all(127.0f))); }

void quantize(float* x, int size, int rotation, const Activations& out, int row, int start) {
    if (rotation) rotate(x, size, rotation);
    int8_t* values = out.values + static_cast<size_t>(row) * out.inputs + start;
    size_t at = out.first_block(row) + 16 * (start / BLOCK);
    for (int i = 0; i < size; i += BLOCK, at += 16) {
        F16 a[2], top = all(0.0f);
        for (int j = 0; j < 2; j++) {
            a[j] = load(x + i + 16 * j);
            top = max(top, abs(a[j]));
        }
        float size_of = largest(top), scale = size_of / 127.0f;
        F16 inverse = all(size_of > 0 ? 127.0f / size_of : 0.0f);
        for (F16& one : a) one = quantized(one, inverse);
        int32_t total = store_int8(values + i, a);
        out.scales[at] = scale;
        out.sums[at] = total;
        out.weighted_sums[at] = scale * static_cast<float>(total);
    }
}

void swiglu(const float* gate, const float* up, int size, float* out) {
    for (int i = 0; i < size; i += 16) {
        F16 g = load(gate + i);
        store(out + i, g / (all(1.0f) + exponential(all(0.0f) - g)) * load(up + i));
    }
}

void rope(float* head, const float* cosine, const float* sine, int dim) {
    for (int i = 0; i < dim / 2; i += 16) {
        F16 low = load(head + i), high = load(head + dim / 2 + i), c = load(cosine + i), s = load(sine + i);
        store(head + i, low * c - high * s);
        store(head + dim / 2 + i, high * c + low * s);
    }
}

float quantize_head(const float* x, int dim, int8_t* out) {
    F16 top = all(0.0f);
    for (int i = 0; i < dim; i += 16) top = max(top, abs(load(x + i)));
    float size_of = largest(top);
    F16 inverse = all(size_of > 0 ? 127.0f / size_of : 0.0f);
    for (int i = 0; i < dim; i += BLOCK) {
        F16 a[] = {quantized(load(x + i), inverse), quantized(load(x + i + 16), inverse)};
        store_int8(out + i, a);
    }
    return size_of / 127.0f;
}

// The number of a float in -448 … 448: to the nearest, of two equally near the one with an even last bit.
inline uint8_t to_fp8(float x) {
    constexpr uint32_t SMALLEST_NORMAL = 121u << 23, HALF = 0x7FFFF;  // 2^-6, and not quite half of the last bit that is kept
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFF;
    const uint32_t normal = ((size + HALF + (size >> 20 & 1)) >> 20) - (120 << 3);
    // Below, numbers are multiples of 2^-9, which is the last bit of this sum.
    const float sum = __builtin_fabsf(x) + 0x1p14f;
    uint32_t multiple;
    __builtin_memcpy(&multiple, &sum, 4);
    return static_cast<uint8_t>(sign | (size < SMALLEST_NORMAL ? multiple & 0xF : normal));
}

float quantize_head_fp8(const float* x, int dim, uint8_t* out) {
    F16 top = all(0.0f);
    for (int i = 0; i < dim; i += 16) top = max(top, abs(load(x + i)));
    const float size_of = largest(top);
    float inverse = LARGEST_FP8 / size_of;
    if (!(inverse <= __FLT_MAX__)) inverse = 0.0f;  // all zero, or next to it
    float scaled[MOST_DIM];
    for (int i = 0; i < dim; i += 16) store(scaled + i, min(max(load(x + i) * all(inverse), all(-LARGEST_FP8)), all(LARGEST_FP8)));
    for (int i = 0; i < dim; i++) out[i] = to_fp8(scaled[i]);
    return size_of / LARGEST_FP8;
}

#include "attention.inl"
#include "sampling.inl"
#include "selection.inl"

}  // namespace

#define DECODEFLEET_SHARED_KERNELS \
    attend_fp32, attend_fp8, embed, norm, quantize, swiglu, rope, rotate, quantize_head, quantize_head_fp8, combine, score_summary, \
        score_sketches, add_softmax, scan, widen, temper, weigh
#define DECODEFLEET_KERNELS(NAME) \
    {NAME, nothing, nothing, linear, attend_int8, DECODEFLEET_SHARED_KERNELS}
