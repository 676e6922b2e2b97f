// What each instruction-set tier implements. All tiers give the same bits: the same operations in the same order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace decodefleet {

constexpr int TILE = 16;  // outputs of a matrix that are computed together
constexpr int BLOCK = 32;  // inputs that share a scale
constexpr int PAGE = 16;  // tokens
constexpr int PARTITION = 256;  // tokens whose softmax is one piece
constexpr int SCAN = 64;  // logits that sampling looks at together
constexpr int MOST_DIM = 128;  // of a head
constexpr int GROUP = 48;  // query heads that read keys and values together, at most
constexpr float LARGEST_WEIGHT = 16383;  // of softmax weights as whole numbers
constexpr float LARGEST_FP8 = 448;
constexpr float FP8_UNIT = 256;  // what `load_fp8` leaves out

// Rows quantised to int8 in blocks of 32. Kernels may read up to a multiple of 16 rows.
struct Activations {
    int8_t* values;  // [rows, inputs]
    float* scales;  // [rows / 16, inputs / 32, 16]
    float* weighted_sums;  // scale times sum of the block
    int32_t* sums;
    int32_t inputs;

    // Where a row's first block is in scales and sums; each next one is 16 further.
    size_t first_block(int row) const { return static_cast<size_t>(row / 16) * (inputs / BLOCK) * 16 + row % 16; }
};

// One head's keys and values of 16 tokens in the pool.
struct PageView {
    uint8_t* keys;  // int8 [dim / 4][16][4], or fp32 or fp8 [dim][16]
    uint8_t* values;  // int8 [16 / 4][dim][4], or fp32 or fp8 [16][dim]
    float* key_scales;  // [16], not with fp32
    float* value_scales;
    int8_t* summaries;  // a sketch, and a box: [high and low values, scale]; DF_HIERARCHICAL only
};

// Softmax over a part of a query's tokens: the largest score, the sum of the weights, and the weighted sum of the values.
struct Partial {
    float top;
    float sum;
    float* values;  // [dim]
};

// A thread's room for the scores of some query heads, their weights, and what else a tier wants.
struct alignas(64) AttentionScratch {
    static constexpr int QUERIES = 16;

    float scores[QUERIES * PARTITION];
    uint8_t weights[QUERIES * 2 * PARTITION];  // as a tier's store_weights leaves them
    int8_t queries[QUERIES * MOST_DIM];
    int8_t values[PARTITION * MOST_DIM];  // [PARTITION / 4, dim, 4]
    float results[GROUP * MOST_DIM];  // of this partition, [GROUP, dim]
};

// Queries that read one partition of one head's keys and values.
struct AttentionPart {
    const PageView* pages;  // of the partition
    const PageView* next;  // that will probably be read after them
    int next_count;
    const int8_t* int8_queries[GROUP];
    const float* queries[GROUP];  // not with int8 keys and values; 1 / sqrt(dim) included
    float scales[GROUP];  // of the int8 queries, the 1 / sqrt(dim) included
    int tokens[GROUP];  // of this partition up to the query's last; at least 1
    int hidden_from[GROUP], hidden_to[GROUP];  // among these, tokens that the query does not see; empty where to <= from
    int count;
    int dim;
    AttentionScratch* scratch;
    Partial result[GROUP];
};

struct Kernels {
    const char* name;
    void (*enter)();  // on a thread before it calls `linear` or `attend_int8`
    void (*leave)();  // and after
    // x · w + bias for some rows and some tiles of outputs, added to what is there if `add`. `out` is where the first of each go.
    void (*linear)(const df_linear& w, int first_tile, int last_tile, const Activations& x, int first_row, int last_row, float* out, int stride, bool add);
    void (*attend_int8)(AttentionPart& part);
    void (*attend_fp32)(AttentionPart& part);
    void (*attend_fp8)(AttentionPart& part);
    void (*embed)(const df_linear& w, int token, float* out);
    void (*norm)(const float* x, const float* weight, int size, float epsilon, float* out);
    // Quantises `size` values into row `row`, from input `first` on; rotated in groups of `rotation` (0, 32 or 64), in place.
    void (*quantize)(float* x, int size, int rotation, const Activations& out, int row, int first);
    void (*swiglu)(const float* gate, const float* up, int size, float* out);
    void (*rope)(float* head, const float* cosine, const float* sine, int dim);
    void (*rotate)(float* x, int size, int width);
    // Quantises one head to int8, or to fp8, and returns the scale.
    float (*quantize_head)(const float* x, int dim, int8_t* out);
    float (*quantize_head_fp8)(const float* x, int dim, uint8_t* out);
    // Adds the next partition to what was combined before it.
    void (*combine)(Partial& all, const Partial& next, int dim);
    int32_t (*score_summary)(const int16_t* query, const uint8_t* box, int dim);
    void (*score_sketches)(const int8_t* sums, const uint8_t* const* sketches, int count, int dim, float scale, float* scores);
    void (*add_softmax)(float* scores, int size, float* total);
    // See sampling.inl.
    bool (*scan)(const float* x, int size, float* tops);
    void (*widen)(const float* x, int size, double* z);
    void (*temper)(double* z, int size, double temperature, double* tops);
    double (*weigh)(const double* z, double top, double* weights);
};

// While a thread computes matrices.
class Entered {
  public:
    explicit Entered(const Kernels& kernels) : kernels_(kernels) { kernels_.enter(); }
    ~Entered() { kernels_.leave(); }

  private:
    const Kernels& kernels_;
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels, amx_kernels;
#endif

// Null where no such tier can run; the best for a null name.
const Kernels* find_kernels(const char* name);

// How the inputs of a matrix are rotated: 0 for not.
inline int rotation_of(const df_linear& w) {
    return w.format != DF_INT8_ROTATED ? 0 : w.inputs % 64 == 0 ? 64 : 32;
}

inline int tiles_of(const df_linear& w) { return (w.outputs + TILE - 1) / TILE; }

// Scales and minima of a block of a tile, fp16.
constexpr int header_bytes(int format) { return format == DF_Q4_0 || format == DF_Q8_0 ? 2 * TILE : format == DF_Q4_1 ? 4 * TILE : 0; }

constexpr int block_bytes(int format) { return header_bytes(format) + TILE * BLOCK / (format == DF_Q4_0 || format == DF_Q4_1 ? 2 : 1); }

}  // namespace decodefleet
