#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace decodefleet {

namespace {

constexpr int TILE_ROWS = 16;

}  // namespace

Attention::Attention(const df_model& model, const Kernels& kernels, Threads& threads)
    : model_(model), kernels_(kernels), threads_(threads), heads_per_kv_(model.heads / model.kv_heads) {
    scratch_.resize(static_cast<size_t>(threads.count()) * GROUP * (PARTITION + model.head_dim));
    selection_.resize(threads.count());
}

int64_t Attention::head_bytes(const df_model& model) {
    if (model.kv_format != DF_KV_INT8) return PAGE * 2 * model.head_dim * 4;
    return PAGE * (2 * model.head_dim + 8) + (model.sparsity == DF_HIERARCHICAL ? 2 * (model.head_dim + 4) : 0);
}

void Attention::set_pool(uint8_t* pool, int64_t pages) {
    pool_ = pool;
    pages_ = pages;
}

PageView Attention::page(int layer, int32_t page, int kv_head) const {
    uint8_t* base = pool_ + ((layer * pages_ + page) * model_.kv_heads + kv_head) * head_bytes(model_);
    int64_t half = static_cast<int64_t>(PAGE) * model_.head_dim * (model_.kv_format == DF_KV_INT8 ? 1 : 4);
    float* scales = reinterpret_cast<float*>(base + 2 * half);
    return {base, base + half, scales, scales + PAGE, reinterpret_cast<int8_t*>(scales + 2 * PAGE)};
}

void Attention::plan(const df_batch& batch) {
    tiles_.clear();
    positions_.resize(batch.rows);
    page_of_.resize(batch.rows);
    most_partitions_ = 0;
    const int tile_rows = hierarchical() ? 1 : TILE_ROWS;
    int row = 0;
    for (int span = 0; span < batch.spans; span++) {
        const int32_t* pages = batch.pages + batch.page_offset[span];
        int start = batch.span_start[span], end = start + batch.span_length[span];
        for (int position = start; position < end; position += tile_rows) {
            tiles_.push_back({row + position - start, std::min(tile_rows, end - position), position, pages});
            most_partitions_ = std::max(most_partitions_, tiles_.back().partitions());
        }
        for (int position = start; position < end; position++, row++) {
            positions_[row] = position;
            page_of_[row] = pages[position / PAGE];
        }
    }
    if (hierarchical()) plan_selected(batch);
    int items = static_cast<int>(tiles_.size()) * model_.kv_heads;
    split_ = most_partitions_ > 1 && items < 4 * threads_.count();
    size_t states = static_cast<size_t>(split_ ? items * most_partitions_ : threads_.count()) * tile_rows * heads_per_kv_;
    size_t queries = static_cast<size_t>(batch.rows) * model_.heads;
    if (model_.kv_format == DF_KV_INT8) int8_queries_.resize(queries * model_.head_dim);
    query_scales_.resize(queries);
    if (partials_.size() < states) {
        partials_.resize(states);
        values_.resize(states * model_.head_dim);
        for (size_t i = 0; i < states; i++) partials_[i].values = &values_[i * model_.head_dim];
    }
}

void Attention::run(int thread, int layer, float* qkv, const Activations& quantized, int rotation, float* out) {
    const int kv_heads = model_.kv_heads, items = static_cast<int>(tiles_.size()) * kv_heads;
    const int64_t queries = static_cast<int64_t>(TILE_ROWS) * heads_per_kv_;
    threads_.phase(static_cast<int>(positions_.size()) * kv_heads, [&](int item) { write(layer, item / kv_heads, item % kv_heads, qkv); });
    if (hierarchical()) return run_selected(thread, layer, quantized, rotation, out);
    if (split_) {
        threads_.phase(items * most_partitions_, [&](int item) {
            const Tile& tile = tiles_[item / most_partitions_ / kv_heads];
            int part = item % most_partitions_;
            if (part < tile.partitions()) partition(thread, layer, qkv, tile, item / most_partitions_ % kv_heads, part, &partials_[item * queries]);
        });
    }
    threads_.phase(items, [&](int item) {
        const Tile& tile = tiles_[item / kv_heads];
        Partial* all = &partials_[split_ ? item * most_partitions_ * queries : thread * queries];
        for (int part = 0; part < tile.partitions(); part++) {
            if (!split_) {
                partition(thread, layer, qkv, tile, item % kv_heads, part, all);
                continue;
            }
            merge(tile, part, all);
        }
        finish(tile, item % kv_heads, all, quantized, rotation, out);
    });
}

bool Attention::sees(int position, int part) const {
    const int from = part * PARTITION;
    return position >= from && (!windowed() || from < model_.sinks || position - model_.window < from + PARTITION - 1);
}

int Attention::first_part(int position) const {
    return windowed() && !model_.sinks ? std::max(0, position - model_.window + 1) / PARTITION : 0;
}

// Adds a partition of a tile that was split to those before it.
void Attention::merge(const Tile& tile, int part, Partial* all) const {
    const int dim = model_.head_dim, queries = tile.rows * heads_per_kv_;
    const Partial* next = all + static_cast<int64_t>(part) * TILE_ROWS * heads_per_kv_;
    for (int query = 0; part && query < queries; query++) {
        const int position = tile.start + query / heads_per_kv_;
        if (!sees(position, part)) continue;
        if (part > first_part(position)) {
            kernels_.combine(all[query], next[query], dim);
            continue;
        }
        all[query].top = next[query].top;
        all[query].sum = next[query].sum;
        std::memcpy(all[query].values, next[query].values, dim * sizeof(float));
    }
}

void Attention::write(int layer, int row, int kv_head, float* qkv) {
    const int dim = model_.head_dim, slot = positions_[row] % PAGE;
    const bool int8 = model_.kv_format == DF_KV_INT8;
    const int64_t at = static_cast<int64_t>(positions_[row]) * (dim / 2);
    float* base = qkv + static_cast<size_t>(row) * (model_.heads + 2 * model_.kv_heads) * dim;
    const float root = std::sqrt(static_cast<float>(dim));
    for (int head = kv_head * heads_per_kv_; head < (kv_head + 1) * heads_per_kv_; head++) {
        float* query = base + head * dim;
        kernels_.rope(query, model_.cosine + at, model_.sine + at, dim);
        if (int8) {
            size_t number = static_cast<size_t>(row) * model_.heads + head;
            kernels_.rotate(query, dim, 64);
            query_scales_[number] = kernels_.quantize_head(query, dim, &int8_queries_[number * dim]) / root;
        } else {
            for (int d = 0; d < dim; d++) query[d] /= root;
        }
    }
    float *key = base + (model_.heads + kv_head) * dim, *value = key + model_.kv_heads * dim;
    PageView to = page(layer, page_of_[row], kv_head);
    kernels_.rope(key, model_.cosine + at, model_.sine + at, dim);
    if (int8) {
        alignas(32) int8_t bytes[128];
        kernels_.rotate(key, dim, 64);
        to.key_scales[slot] = kernels_.quantize_head(key, dim, bytes);
        for (int d = 0; d < dim; d += 4) std::memcpy(to.keys + d * PAGE + slot * 4, bytes + d, 4);
        kernels_.rotate(value, dim, 64);
        to.value_scales[slot] = kernels_.quantize_head(value, dim, reinterpret_cast<int8_t*>(to.values) + slot * dim);
    } else {
        for (int d = 0; d < dim; d++) reinterpret_cast<float*>(to.keys)[d * PAGE + slot] = key[d];
        std::memcpy(reinterpret_cast<float*>(to.values) + slot * dim, value, dim * sizeof(float));
    }
}

void Attention::partition(int thread, int layer, const float* qkv, const Tile& tile, int kv_head, int part, Partial* all) {
    const int dim = model_.head_dim, from = part * PARTITION;
    const bool int8 = model_.kv_format == DF_KV_INT8;
    // Rows before `begin` come before this partition, and the window of those from `end` on after it.
    const int begin = std::max(0, from - tile.start);
    int end = tile.rows;
    if (windowed() && from >= model_.sinks) end = std::min(end, from + PARTITION - 1 + model_.window - tile.start);
    if (begin >= end) return;
    // Pages between the sinks and the first row's window are left out: they would add zeros.
    int kept = PARTITION / PAGE, next = kept;
    if (windowed()) {
        kept = std::clamp((model_.sinks - from + PAGE - 1) / PAGE, 0, PARTITION / PAGE);
        next = std::clamp((std::max(0, tile.start + begin - model_.window + 1) - from) / PAGE, kept, PARTITION / PAGE);
    }
    const int left_out = (next - kept) * PAGE;
    PageView pages[PARTITION / PAGE];
    int count = 0;
    for (int i = 0; i < PARTITION / PAGE && from + i * PAGE < tile.start + end; i++) {
        if (i < kept || i >= next) pages[count++] = page(layer, tile.pages[from / PAGE + i], kv_head);
    }
    selection_[thread].bytes_read += count * (head_bytes(model_));
    float* scratch = &scratch_[static_cast<size_t>(thread) * GROUP * (PARTITION + dim)];
    AttentionPart work{};
    work.pages = pages;
    work.dim = dim;
    work.scratch = scratch;
    bool begins[GROUP];
    for (int query = begin * heads_per_kv_; query < end * heads_per_kv_; query += work.count) {
        work.count = std::min(GROUP, end * heads_per_kv_ - query);
        for (int i = 0; i < work.count; i++) {
            int row = (query + i) / heads_per_kv_, head = kv_head * heads_per_kv_ + (query + i) % heads_per_kv_;
            size_t number = static_cast<size_t>(tile.first_row + row) * model_.heads + head;
            const int position = tile.start + row;
            work.tokens[i] = std::min(PARTITION, position + 1 - from) - left_out;
            work.hidden_from[i] = std::max(0, model_.sinks - from);
            work.hidden_to[i] = windowed() ? std::min(work.tokens[i], position - model_.window + 1 - from - left_out) : 0;
            begins[i] = split_ || part == first_part(position);
            if (int8) {
                work.int8_queries[i] = &int8_queries_[number * dim];
                work.scales[i] = query_scales_[number];
            } else {
                work.queries[i] = qkv + static_cast<size_t>(tile.first_row + row) * (model_.heads + 2 * model_.kv_heads) * dim + head * dim;
            }
            work.result[i].values = begins[i] ? all[query + i].values : scratch + GROUP * PARTITION + i * dim;
        }
        int8 ? kernels_.attend_int8(work) : kernels_.attend_fp32(work);
        for (int i = 0; i < work.count; i++) {
            if (begins[i]) {
                all[query + i] = work.result[i];
            } else {
                kernels_.combine(all[query + i], work.result[i], dim);
            }
        }
    }
}

void Attention::finish(const Tile& tile, int kv_head, const Partial* all, const Activations& quantized, int rotation, float* out) {
    const int dim = model_.head_dim;
    for (int query = 0; query < tile.rows * heads_per_kv_; query++) {
        int row = tile.first_row + query / heads_per_kv_, head = kv_head * heads_per_kv_ + query % heads_per_kv_;
        float* values = all[query].values;
        for (int d = 0; d < dim; d++) values[d] /= all[query].sum;
        if (model_.kv_format == DF_KV_INT8) kernels_.rotate(values, dim, 64);
        if (out) std::memcpy(out + (static_cast<size_t>(row) * model_.heads + head) * dim, values, dim * sizeof(float));
        kernels_.quantize(values, dim, rotation, quantized, row, head * dim);
    }
}

}  // namespace decodefleet
