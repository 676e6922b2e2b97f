// The C interface between Python and the engine: plain structures, pointers to memory that the caller keeps alive.
#pragma once

#include <cstdint>

extern "C" {

// Number formats of a packed matrix. Outputs go in tiles of 16, inputs in blocks of 32; a tile's blocks lie one after the other.
enum df_format : int32_t {
    DF_Q4_0 = 0,  // block: 16 scales (fp16), 256 bytes of nibbles
    DF_Q4_1 = 1,  // block: 16 scales (fp16), 16 minima (fp16), 256 bytes of nibbles
    DF_Q8_0 = 2,  // block: 16 scales (fp16), 512 bytes
    DF_INT8_ROTATED = 3,  // block: 512 bytes; one fp32 scale per output; the inputs are rotated
};

enum df_kv_format : int32_t { DF_KV_FP32 = 0, DF_KV_INT8 = 1, DF_KV_FP8 = 2 };  // FP8: e4m3

// Which tokens a row at position p attends to. DF_SLIDING_WINDOW: those before `sinks`, and the last `window`, itself included.
// DF_HIERARCHICAL: the pages of these, whole, and of the pages between them as many as make up `budget`, picked by summaries; int8 only.
enum df_sparsity : int32_t { DF_DENSE = 0, DF_SLIDING_WINDOW = 1, DF_HIERARCHICAL = 2 };

struct df_linear {
    const uint8_t* data;
    const float* output_scale;  // [outputs, padded to 16], DF_INT8_ROTATED only
    const float* bias;  // [outputs] or null
    int32_t format;
    int32_t outputs;
    int32_t inputs;
    int32_t padding;
};

struct df_layer {
    const float* input_norm;  // [hidden]
    const float* mlp_norm;  // [hidden]
    df_linear q, k, v, output, gate, up, down;
};

struct df_model {
    const df_layer* layer;  // [layers]
    const float* norm;  // [hidden]
    const float* cosine;  // [context, head_dim / 2]
    const float* sine;
    df_linear embedding;
    df_linear head;
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, kv_format;
    float epsilon;
    int32_t sparsity, sinks, window, budget;  // tokens
};

struct df_batch {
    const int32_t* token_ids;  // [rows]
    const int32_t* span_start;  // [spans] position of the span's first row
    const int32_t* span_length;  // [spans]
    const int32_t* page_offset;  // [spans] where the span's pages begin in `pages`
    const int32_t* pages;  // -1 where no row of the span sees a token of the page
    const int32_t* sampled;  // [samples] rows whose logits are wanted
    float* logits;  // [samples, vocabulary]
    int32_t rows, spans, samples;
};

// How a row's token is drawn; the same meaning as in engine/sampling.py.
struct df_draw {
    double temperature, top_p, min_p, repetition, presence, frequency;
    uint64_t seed, sample, position;  // the key of the random number
    const int32_t* token_ids;  // prompt and output, [tokens]; read for penalties only
    int32_t tokens, prompt_tokens;
    int32_t top_k;  // 0 for no limit
    int32_t padding;
};

struct df_engine;

// The best tier this processor runs, or the named one: "avx2", "portable". Null where there is none of that name or it cannot run.
const char* df_tier(const char* name);
int64_t df_page_bytes(const df_model* model);  // one page of one layer
df_engine* df_create(const df_model* model, const char* tier, int32_t threads);
void df_destroy(df_engine* engine);
void df_set_pool(df_engine* engine, uint8_t* pool, int64_t pages);  // [layers, pages, page bytes]
int64_t df_bytes_read(const df_engine* engine);  // by attention, from the pool, since the engine was created
void df_step(df_engine* engine, const df_batch* batch);
// The token of each row of logits, [rows, vocabulary]: as `draws` say, the likeliest for null; -1 where a logit is not finite.
void df_sample(df_engine* engine, const float* logits, int32_t rows, int32_t vocabulary, const df_draw* draws, int32_t* token_ids);
// The matrix products of a step of so many rows, and nothing else: the floor that a step is measured against.
void df_products(df_engine* engine, int32_t rows, int32_t samples);

// Single kernels, for tests.
void df_linear_rows(const char* tier, const df_linear* linear, const float* x, int32_t rows, float* out);
void df_embed(const char* tier, const df_linear* linear, int32_t token, float* out);
void df_rms_norm(const char* tier, const float* x, const float* weight, int32_t size, float epsilon, float* out);
void df_swiglu(const char* tier, const float* gate, const float* up, int32_t size, float* out);
double df_uniform(uint64_t seed, uint64_t sample, uint64_t position);
void df_sample_rows(const char* tier, const float* logits, int32_t rows, int32_t vocabulary, const df_draw* draws, int32_t* token_ids);
void df_attention(const char* tier, const df_model* model, const df_batch* batch, const float* qkv, uint8_t* pool, int64_t pages, int32_t threads, float* out);
}
