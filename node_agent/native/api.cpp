// The C interface.
#include <vector>

#include "engine.h"

using namespace decodefleet;

struct df_engine {
    Engine engine;
};

extern "C" {

const char* df_tier(const char* name) {
    const Kernels* kernels = find_kernels(name);
    return kernels ? kernels->name : nullptr;
}

int64_t df_page_bytes(const df_model* model) { return Attention::head_bytes(*model) * model->kv_heads; }

df_engine* df_create(const df_model* model, const char* tier, int32_t threads) {
    return new df_engine{Engine(*model, *find_kernels(tier), threads)};
}

void df_destroy(df_engine* engine) { delete engine; }

void df_set_pool(df_engine* engine, uint8_t* pool, int64_t pages) { engine->engine.set_pool(pool, pages); }

int64_t df_bytes_read(const df_engine* engine) { return engine->engine.bytes_read(); }

void df_step(df_engine* engine, const df_batch* batch) { engine->engine.step(*batch); }

void df_sample(df_engine* engine, const float* logits, int32_t rows, int32_t vocabulary, const df_draw* draws, int32_t* token_ids) {
    engine->engine.sample(logits, rows, vocabulary, draws, token_ids);
}

void df_products(df_engine* engine, int32_t rows, int32_t samples) { engine->engine.products(rows, samples); }

void df_linear_rows(const char* tier, const df_linear* linear, const float* x, int32_t rows, float* out) {
    FlushDenormals flush;
    const Kernels& kernels = *find_kernels(tier);
    Entered entered(kernels);
    ActivationBuffer buffer(linear->inputs);
    const Activations& activations = buffer.resize(rows);
    std::vector<float> row(linear->inputs);
    for (int r = 0; r < rows; r++) {
        row.assign(x + static_cast<size_t>(r) * linear->inputs, x + static_cast<size_t>(r + 1) * linear->inputs);
        kernels.quantize(row.data(), linear->inputs, rotation_of(*linear), activations, r, 0);
    }
    kernels.linear(*linear, 0, tiles_of(*linear), activations, 0, rows, out, linear->outputs, false);
}

void df_embed(const char* tier, const df_linear* linear, int32_t token, float* out) { find_kernels(tier)->embed(*linear, token, out); }

void df_rms_norm(const char* tier, const float* x, const float* weight, int32_t size, float epsilon, float* out) {
    FlushDenormals flush;
    find_kernels(tier)->norm(x, weight, size, epsilon, out);
}

void df_swiglu(const char* tier, const float* gate, const float* up, int32_t size, float* out) {
    FlushDenormals flush;
    find_kernels(tier)->swiglu(gate, up, size, out);
}

double df_uniform(uint64_t seed, uint64_t sample, uint64_t position) { return uniform(seed, sample, position); }

void df_sample_rows(const char* tier, const float* logits, int32_t rows, int32_t vocabulary, const df_draw* draws, int32_t* token_ids) {
    Sampler sampler(*find_kernels(tier));
    for (int r = 0; r < rows; r++) token_ids[r] = sampler.choose(logits + static_cast<size_t>(r) * vocabulary, vocabulary, draws ? draws + r : nullptr);
}

void df_attention(const char* tier, const df_model* model, const df_batch* batch, const float* qkv, uint8_t* pool, int64_t pages,
                  int32_t threads, float* out) {
    Threads pool_of_threads(threads);
    Attention attention(*model, *find_kernels(tier), pool_of_threads);
    attention.set_pool(pool, pages);
    attention.plan(*batch);
    ActivationBuffer buffer(model->heads * model->head_dim);
    const Activations& activations = buffer.resize(batch->rows);
    std::vector<float> rows(qkv, qkv + static_cast<size_t>(batch->rows) * (model->heads + 2 * model->kv_heads) * model->head_dim);
    pool_of_threads.run([&](int thread) {
        Entered entered(*find_kernels(tier));
        attention.run(thread, 0, rows.data(), activations, 0, out);
    });
}

}  // extern "C"
