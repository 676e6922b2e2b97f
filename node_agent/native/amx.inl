// Matrix products of many rows in AMX's tiles, bit for bit those of kernels.inl: the products of a block are whole numbers, scaled and added alike.
// Included by tier_amx.cpp after kernels.inl.

namespace {

constexpr int TILE_ROWS = 16;
constexpr int FEWEST_ROWS = 10;  // that are worth a tile

struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Tile 0: products [16 rows, 16 outputs]; 1: inputs [16 rows, 32]; 2: weights [32 / 4, 16 outputs, 4 inputs]; the others: 16 times 64 bytes.
const TileConfig CONFIG = {1, 0, {}, {64, BLOCK, 64, 64, 64, 64, 64, 64}, {16, 16, BLOCK / 4, 16, 16, 16, 16, 16}};

// As assembly, since compilers' own functions for these do not all say which memory they read.
void enter() { __asm__ volatile("ldtilecfg %0" ::"m"(CONFIG)); }

void leave() { __asm__ volatile("tilerelease" ::); }

inline void multiply_tiles(const int8_t* inputs, int64_t row_bytes, const uint8_t* weights, int32_t* products) {
    __asm__ volatile(
        "tilezero %%tmm0\n\t"
        "tileloadd (%0, %1, 1), %%tmm1\n\t"
        "tileloadd (%2, %4, 1), %%tmm2\n\t"
        "tdpbssd %%tmm2, %%tmm1, %%tmm0\n\t"
        "tilestored %%tmm0, (%3, %4, 1)"
        :
        : "r"(inputs), "r"(row_bytes), "r"(weights), "r"(products), "r"(int64_t{4 * TILE})
        : "memory");
}

// The weights of a tile as bytes, [inputs / 4, 16 outputs, 4].
template <int FORMAT>
void unpack(const uint8_t* quants, int blocks, uint8_t* bytes) {
    const __m512i mask = _mm512_set1_epi8(15), zero = _mm512_set1_epi8(FORMAT == DF_Q4_0 ? 8 : 0);
    for (int b = 0; b < blocks; b++, quants += block_bytes(FORMAT), bytes += TILE * BLOCK) {
        for (int j = 0; j < 4; j++) {
            __m512i both = _mm512_loadu_si512(quants + 64 * j);
            _mm512_store_si512(bytes + 64 * j, _mm512_sub_epi8(_mm512_and_si512(both, mask), zero));
            _mm512_store_si512(bytes + 64 * (j + 4), _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), zero));
        }
    }
}

// Up to 16 rows, of which the first is a multiple of 16. `bytes`: the tile's weights, those of a block `step` after those of the last.
template <int FORMAT>
void tile_of_rows(const df_linear& w, int tile, const uint8_t* bytes, int step, const Activations& x, int row, int rows, float* to, int stride, bool add) {
    const int blocks = w.inputs / BLOCK;
    const uint8_t* block = tile_data<FORMAT>(w, tile);
    const int8_t* values = x.values + static_cast<size_t>(row) * w.inputs;
    const float *scales = x.scales + x.first_block(row), *weighted_sums = x.weighted_sums + x.first_block(row);
    alignas(64) int32_t products[2][TILE_ROWS * TILE];
    F16 acc[TILE_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) acc[r] = all(0.0f);
    multiply_tiles(values, w.inputs, bytes, products[0]);
    for (int b = 0; b < blocks; b++, block += block_bytes(FORMAT), scales += TILE_ROWS, weighted_sums += TILE_ROWS) {
        bytes += step;
        values += BLOCK;
        if (b + 1 < blocks) multiply_tiles(values, w.inputs, bytes, products[(b + 1) % 2]);  // while this block's products are added
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) {
            I16 dot{_mm512_load_si512(products[b % 2] + r * TILE)};
            acc[r] = add_block<FORMAT>(acc[r], dot, block, scales[r], weighted_sums[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) {
        if (r < rows) finish_tile<FORMAT>(w, tile, acc[r], to + static_cast<size_t>(r) * stride, add);
    }
}

template <int FORMAT>
void amx_linear_of(const df_linear& w, int first_tile, int last_tile, const Activations& x, int first_row, int last_row, float* out, int stride, bool add) {
    constexpr bool NIBBLES = FORMAT == DF_Q4_0 || FORMAT == DF_Q4_1;
    const int blocks = w.inputs / BLOCK, rest = (last_row - first_row) % TILE_ROWS, last = last_row - (rest < FEWEST_ROWS ? rest : 0);
    uint8_t* unpacked = nullptr;
    if constexpr (NIBBLES) unpacked = static_cast<uint8_t*>(__builtin_alloca_with_align(static_cast<size_t>(w.inputs) * TILE, 512));
    for (int t = first_tile; t < last_tile && first_row < last; t++) {
        const uint8_t* quants = tile_data<FORMAT>(w, t) + header_bytes(FORMAT);
        if constexpr (NIBBLES) unpack<FORMAT>(quants, blocks, unpacked);
        float* to = out + (t - first_tile) * TILE;
        for (int row = first_row; row < last; row += TILE_ROWS, to += static_cast<size_t>(TILE_ROWS) * stride) {
            tile_of_rows<FORMAT>(w, t, NIBBLES ? unpacked : quants, NIBBLES ? TILE * BLOCK : block_bytes(FORMAT), x, row, last - row, to, stride, add);
        }
    }
    if (last < last_row) linear_of<FORMAT>(w, first_tile, last_tile, x, last, last_row, out + static_cast<size_t>(last - first_row) * stride, stride, add);
}

void amx_linear(const df_linear& w, int first_tile, int last_tile, const Activations& x, int first_row, int last_row, float* out, int stride, bool add) {
    auto* run = w.format == DF_Q4_0   ? amx_linear_of<DF_Q4_0>
                : w.format == DF_Q4_1 ? amx_linear_of<DF_Q4_1>
                : w.format == DF_Q8_0 ? amx_linear_of<DF_Q8_0>
                                      : amx_linear_of<DF_INT8_ROTATED>;
    run(w, first_tile, last_tile, x, first_row, last_row, out, stride, add);
}

}  // namespace
