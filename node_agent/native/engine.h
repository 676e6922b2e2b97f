// A step of a Llama-like decoder: everything from token ids to logits, on all threads.
#pragma once

#include <vector>

#include "attention.h"
#include "kernels.h"
#include "sampling.h"
#include "threads.h"

namespace decodefleet {

// Room for quantised rows.
class ActivationBuffer {
  public:
    explicit ActivationBuffer(int inputs) : inputs_(inputs) {}
    const Activations& resize(int rows);
    const Activations& get() const { return view_; }

  private:
    int inputs_;
    std::vector<int8_t> values_;
    std::vector<float> scales_, weighted_sums_;
    std::vector<int32_t> sums_;
    Activations view_{};
};

class Engine {
  public:
    Engine(const df_model& model, const Kernels& kernels, int threads);

    void set_pool(uint8_t* pool, int64_t pages) { attention_.set_pool(pool, pages); }
    int64_t bytes_read() const { return attention_.bytes_read(); }
    void step(const df_batch& batch);
    void sample(const float* logits, int rows, int vocabulary, const df_draw* draws, int32_t* token_ids);
    void products(int rows, int samples);

  private:
    void resize(int rows, int samples);
    const Activations& normalized(int thread, int rows, const int32_t* picked, const float* weight, const df_linear& next);
    void matrix(const df_linear* const* linears, int count, const Activations& x, int rows, float* out, int stride, bool add);
    void gate_up(int thread, const df_layer& layer, const Activations& x, int rows);
    void gate_up_piece(int thread, const df_layer& layer, const Activations& x, int at, int piece, int first_row, int count);
    float* scratch(int thread) { return &scratch_[static_cast<size_t>(thread) * scratch_size_]; }

    const df_model model_;
    const Kernels& kernels_;
    Threads threads_;
    Attention attention_;
    std::vector<Sampler> samplers_;  // [threads]
    ActivationBuffer hidden_, attended_, intermediate_;
    std::vector<ActivationBuffer> own_;  // [threads] hidden rows that each thread normalises for itself
    std::vector<float> x_, qkv_, products_;
    std::vector<float> scratch_;  // [threads, scratch_size_]
    size_t scratch_size_;
};

}  // namespace decodefleet
