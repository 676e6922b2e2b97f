#include "engine.h"

#include <algorithm>

namespace decodefleet {

namespace {

constexpr int ROWS = 64;  // of an item: their activations stay in the cache while an item's tiles pass over them
constexpr int FEW_ROWS = 2;  // that each thread normalises for itself, which takes less than to wait for the others

int divided(int a, int b) { return (a + b - 1) / b; }

// Tiles of an item of work: one run for each thread, which so prefetches what is its own, but not so long that one idles at the end.
int tiles_of_item(const df_linear* const* linears, int count, int threads) {
    int most = 0;
    for (int i = 0; i < count; i++) most = std::max(most, tiles_of(*linears[i]));
    return std::min(divided(most, threads), 64);
}

template <class T>
void grow(std::vector<T>& values, size_t size) {
    if (values.size() < size) values.resize(size);
}

}  // namespace

const Activations& ActivationBuffer::resize(int rows) {
    rows = divided(rows, 16) * 16;
    size_t blocks = static_cast<size_t>(rows) * inputs_ / BLOCK;
    grow(values_, blocks * BLOCK);
    grow(scales_, blocks);
    grow(weighted_sums_, blocks);
    grow(sums_, blocks);
    view_ = {values_.data(), scales_.data(), weighted_sums_.data(), sums_.data(), inputs_};
    return view_;
}

Engine::Engine(const df_model& model, const Kernels& kernels, int threads)
    : model_(model), kernels_(kernels), threads_(threads), attention_(model_, kernels_, threads_), samplers_(threads, Sampler(kernels)), hidden_(model.hidden),
      attended_(model.heads * model.head_dim), intermediate_(model.intermediate),
      own_(threads, ActivationBuffer(model.hidden)), scratch_size_(std::max<size_t>(model.hidden, 2 * ROWS * 64)) {
    scratch_.resize(scratch_size_ * threads);
    for (ActivationBuffer& buffer : own_) buffer.resize(FEW_ROWS);
}

void Engine::resize(int rows, int samples) {
    int most = std::max(rows, samples);
    hidden_.resize(most);
    attended_.resize(rows);
    intermediate_.resize(rows);
    grow(x_, static_cast<size_t>(rows) * model_.hidden);
    grow(qkv_, static_cast<size_t>(rows) * (model_.heads + 2 * model_.kv_heads) * model_.head_dim);
}

void Engine::step(const df_batch& batch) {
    const int rows = batch.rows, hidden = model_.hidden, width = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    resize(rows, batch.samples);
    attention_.plan(batch);
    threads_.run([&](int thread) {
        Entered entered(kernels_);
        threads_.phase(rows, threads_.share(rows), [&](int row) {
            kernels_.embed(model_.embedding, batch.token_ids[row], &x_[static_cast<size_t>(row) * hidden]);
        });
        for (int index = 0; index < model_.layers; index++) {
            const df_layer& layer = model_.layer[index];
            const df_linear* projections[] = {&layer.q, &layer.k, &layer.v};
            matrix(projections, 3, normalized(thread, rows, nullptr, layer.input_norm, layer.q), rows, qkv_.data(), width, false);
            attention_.run(thread, index, qkv_.data(), attended_.get(), rotation_of(layer.output), nullptr);
            const df_linear* output = &layer.output;
            matrix(&output, 1, attended_.get(), rows, x_.data(), hidden, true);
            gate_up(thread, layer, normalized(thread, rows, nullptr, layer.mlp_norm, layer.gate), rows);
            const df_linear* down = &layer.down;
            matrix(&down, 1, intermediate_.get(), rows, x_.data(), hidden, true);
        }
        if (!batch.samples) return;
        const df_linear* head = &model_.head;
        matrix(&head, 1, normalized(thread, batch.samples, batch.sampled, model_.norm, model_.head), batch.samples, batch.logits, model_.head.outputs, false);
    });
}

void Engine::sample(const float* logits, int rows, int vocabulary, const df_draw* draws, int32_t* token_ids) {
    threads_.run([&](int thread) {
        threads_.phase(rows, threads_.share(rows), [&](int row) {
            const float* x = logits + static_cast<size_t>(row) * vocabulary;
            token_ids[row] = samplers_[thread].choose(x, vocabulary, draws ? draws + row : nullptr);
        });
    });
}

void Engine::products(int rows, int samples) {
    resize(rows, samples);
    grow(products_, std::max(static_cast<size_t>(samples) * model_.head.outputs, static_cast<size_t>(rows) * model_.intermediate));
    const int width = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    threads_.run([&](int) {
        Entered entered(kernels_);
        for (int index = 0; index < model_.layers; index++) {
            const df_layer& layer = model_.layer[index];
            const df_linear *projections[] = {&layer.q, &layer.k, &layer.v}, *output = &layer.output, *down = &layer.down;
            const df_linear* up[] = {&layer.gate, &layer.up};
            matrix(projections, 3, hidden_.get(), rows, qkv_.data(), width, false);
            matrix(&output, 1, attended_.get(), rows, x_.data(), model_.hidden, false);
            for (const df_linear* one : up) matrix(&one, 1, hidden_.get(), rows, products_.data(), model_.intermediate, false);
            matrix(&down, 1, intermediate_.get(), rows, x_.data(), model_.hidden, false);
        }
        const df_linear* head = &model_.head;
        if (samples) matrix(&head, 1, hidden_.get(), samples, products_.data(), model_.head.outputs, false);
    });
}

// Rows of x, all in order or those picked, normalised and quantised.
const Activations& Engine::normalized(int thread, int rows, const int32_t* picked, const float* weight, const df_linear& next) {
    const bool few = rows <= FEW_ROWS;
    const Activations& out = (few ? own_[thread] : hidden_).get();
    auto one = [&](int row) {
        float* normed = scratch(thread);
        kernels_.norm(&x_[static_cast<size_t>(picked ? picked[row] : row) * model_.hidden], weight, model_.hidden, model_.epsilon, normed);
        kernels_.quantize(normed, model_.hidden, rotation_of(next), out, row, 0);
    };
    if (few) {
        for (int row = 0; row < rows; row++) one(row);
    } else {
        threads_.phase(rows, threads_.share(rows), one);
    }
    return out;
}

// Several matrices with the same inputs, their outputs side by side.
void Engine::matrix(const df_linear* const* linears, int count, const Activations& x, int rows, float* out, int stride, bool add) {
    const int group = tiles_of_item(linears, count, threads_.count()), chunks = divided(rows, ROWS);
    int groups = 0;
    for (int i = 0; i < count; i++) groups += divided(tiles_of(*linears[i]), group);
    threads_.phase(groups * chunks, [&](int item) {
        int at = item / chunks, first_row = item % chunks * ROWS, first_output = 0, i = 0;
        for (; at >= divided(tiles_of(*linears[i]), group); i++) {
            at -= divided(tiles_of(*linears[i]), group);
            first_output += linears[i]->outputs;
        }
        int last = std::min((at + 1) * group, tiles_of(*linears[i]));
        float* to = out + static_cast<size_t>(first_row) * stride + first_output + at * group * TILE;
        kernels_.linear(*linears[i], at * group, last, x, first_row, std::min(rows, first_row + ROWS), to, stride, add);
    });
}

// Gate and up projections, SwiGLU and its quantisation, in pieces of as many outputs as are quantised together.
void Engine::gate_up(int thread, const df_layer& layer, const Activations& x, int rows) {
    const int piece = model_.intermediate % 64 ? BLOCK : 64, chunks = divided(rows, ROWS);
    const int pieces = model_.intermediate / piece, run = divided(pieces, threads_.count());
    threads_.phase(divided(pieces, run) * chunks, [&](int item) {
        int first = item / chunks * run, first_row = item % chunks * ROWS, count = std::min(rows - first_row, ROWS);
        for (int at = first; at < std::min(first + run, pieces); at++) gate_up_piece(thread, layer, x, at, piece, first_row, count);
    });
}

void Engine::gate_up_piece(int thread, const df_layer& layer, const Activations& x, int at, int piece, int first_row, int count) {
    const int tiles = piece / TILE;
    float *gate = scratch(thread), *up = gate + static_cast<size_t>(ROWS) * piece;
    kernels_.linear(layer.gate, at * tiles, (at + 1) * tiles, x, first_row, first_row + count, gate, piece, false);
    kernels_.linear(layer.up, at * tiles, (at + 1) * tiles, x, first_row, first_row + count, up, piece, false);
    for (int row = 0; row < count; row++) {
        kernels_.swiglu(gate + row * piece, up + row * piece, piece, gate + row * piece);
        kernels_.quantize(gate + row * piece, piece, rotation_of(layer.down), intermediate_.get(), first_row + row, at * piece);
    }
}

}  // namespace decodefleet
