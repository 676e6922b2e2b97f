#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace decodefleet {

constexpr float LOG2_E = 1.44269504f;
constexpr int MOST_TOGETHER = 4;  // items, which may be long, that a thread takes at once

Attention::Attention(const df_model& model, const Kernels& kernels, Threads& threads)
    : model_(model), kernels_(kernels), threads_(threads), heads_per_kv_(model.heads / model.kv_heads), head_bytes_(head_bytes(model)) {
    scratch_.resize(threads.count());
    selection_.resize(threads.count());
}

int64_t Attention::head_bytes(const df_model& model) {
    if (model.kv_format == DF_KV_FP32) return PAGE * 2 * model.head_dim * 4;
    return PAGE * (2 * model.head_dim + 8) + (model.sparsity == DF_HIERARCHICAL ? sketch_bytes(model.head_dim) + model.head_dim + 4 : 0);
}

void Attention::set_pool(uint8_t* pool, int64_t pages) {
    pool_ = pool;
    pages_ = pages;
}

PageView Attention::page(int layer, int32_t page, int kv_head) const {
    uint8_t* base = pool_ + ((layer * pages_ + page) * model_.kv_heads + kv_head) * head_bytes_;
    int64_t half = static_cast<int64_t>(PAGE) * model_.head_dim * (rotated() ? 1 : 4);
    float* scales = reinterpret_cast<float*>(base + 2 * half);
    return {base, base + half, scales, scales + PAGE, reinterpret_cast<int8_t*>(scales + 2 * PAGE)};
}

void Attention::run(int thread, int layer, float* qkv, const Activations& quantized, int rotation, float* out) {
    const int kv_heads = model_.kv_heads, rows = static_cast<int>(positions_.size());
    if (!writes_in_tiles_) {
        threads_.phase(rows * kv_heads, threads_.share(rows * kv_heads), [&](int item) { write(layer, item / kv_heads, item % kv_heads, qkv); });
    }
    if (hierarchical()) return run_selected(thread, layer, quantized, rotation, out);
    auto of_ahead = [&](int item) {
        const Ahead& ahead = ahead_[item / kv_heads];
        return Read{ahead.pages, ahead.part, item % kv_heads, positions_[rows_[ahead.first + ahead.count - 1]]};
    };
    if (const int items = static_cast<int>(ahead_.size()) * kv_heads) {
        threads_.phase(items, std::min(threads_.share(items), MOST_TOGETHER), [&](int item) {
            const Ahead& ahead = ahead_[item / kv_heads];
            partition(thread, layer, qkv, &rows_[ahead.first], ahead.count, of_ahead(item), item + 1 < items ? of_ahead(item + 1) : Read{}, nullptr);
        });
    }
    const int items = static_cast<int>(tiles_.size()) * kv_heads;
    threads_.phase(items, std::min(threads_.share(items), MOST_TOGETHER), [&](int item) {
        const Tile& tile = tiles_[item / kv_heads];
        Partial* all = &partials_[static_cast<size_t>(thread) * TILE_ROWS * heads_per_kv_];
        Read read = of_tile(item);
        if (writes_in_tiles_) write(layer, tile.first_row, read.kv_head, qkv);
        for (int part = 0; part < tile.ahead; part++) merge(tile, read.kv_head, part, all);
        for (; read.part < tile.partitions(); read.part++) {
            Read next = read;
            if (++next.part == tile.partitions()) next = item + 1 < items ? of_tile(item + 1) : Read{};
            partition(thread, layer, qkv, &rows_[tile.first_row], tile.rows, read, next, all);
        }
        finish(tile, read.kv_head, all, quantized, rotation, out);
    });
}

// What is left to read when an item of the tiles' phase begins.
Attention::Read Attention::of_tile(int item) const {
    const Tile& tile = tiles_[item / model_.kv_heads];
    return {tile.pages, tile.ahead, item % model_.kv_heads, tile.start + tile.rows - 1};
}

// The pages that are there, up to 16.
int Attention::views(int layer, const Read& read, PageView* views) const {
    int count = 0;
    for (int i = read.part * (PARTITION / PAGE); i < (read.part + 1) * (PARTITION / PAGE) && read.pages && i <= read.last / PAGE; i++) {
        if (read.pages[i] >= 0) views[count++] = page(layer, read.pages[i], read.kv_head);
    }
    return count;
}

bool Attention::sees(int position, int part) const {
    const int from = part * PARTITION;
    return position >= from && (!windowed() || from < model_.sinks || position - model_.window < from + PARTITION - 1);
}

int Attention::first_part(int position) const {
    return windowed() && !model_.sinks ? std::max(0, position - model_.window + 1) / PARTITION : 0;
}

// Adds a partition that was computed ahead to those before it.
void Attention::merge(const Tile& tile, int kv_head, int part, Partial* all) {
    const int dim = model_.head_dim, queries = tile.rows * heads_per_kv_;
    const Partial* next = stored(tile.first_row, kv_head, part);
    for (int query = 0; query < queries; query++) {
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

Partial* Attention::stored(int row, int kv_head, int part) {
    const Tile& tile = tiles_[tile_of_[row]];
    return &partials_[tile.stored + static_cast<size_t>((kv_head * tile.ahead + part) * tile.rows + row - tile.first_row) * heads_per_kv_];
}

void Attention::write(int layer, int row, int kv_head, float* qkv) {
    const int dim = model_.head_dim, slot = positions_[row] % PAGE;
    const int64_t at = static_cast<int64_t>(positions_[row]) * (dim / 2);
    float* base = qkv + static_cast<size_t>(row) * (model_.heads + 2 * model_.kv_heads) * dim;
    const float factor = LOG2_E / std::sqrt(static_cast<float>(dim));  // the softmax is one of powers of two
    for (int head = kv_head * heads_per_kv_; head < (kv_head + 1) * heads_per_kv_; head++) {
        float* query = base + head * dim;
        kernels_.rope(query, model_.cosine + at, model_.sine + at, dim);
        if (rotated()) kernels_.rotate(query, dim, 64);
        if (int8()) {
            size_t number = static_cast<size_t>(row) * model_.heads + head;
            query_scales_[number] = kernels_.quantize_head(query, dim, &int8_queries_[number * dim]) * factor;
        } else {
            for (int d = 0; d < dim; d++) query[d] *= factor;
        }
    }
    float *key = base + (model_.heads + kv_head) * dim, *value = key + model_.kv_heads * dim;
    PageView to = page(layer, page_of_[row], kv_head);
    kernels_.rope(key, model_.cosine + at, model_.sine + at, dim);
    if (rotated()) {
        kernels_.rotate(key, dim, 64);
        kernels_.rotate(value, dim, 64);
    }
    if (int8()) {
        alignas(64) int8_t bytes[MOST_DIM];
        to.key_scales[slot] = kernels_.quantize_head(key, dim, bytes);
        for (int d = 0; d < dim; d += 4) std::memcpy(to.keys + d * PAGE + slot * 4, bytes + d, 4);
        to.value_scales[slot] = kernels_.quantize_head(value, dim, bytes);
        for (int d = 0; d < dim; d++) to.values[(slot / 4 * dim + d) * 4 + slot % 4] = static_cast<uint8_t>(bytes[d]);
    } else if (model_.kv_format == DF_KV_FP8) {
        uint8_t numbers[MOST_DIM];
        to.key_scales[slot] = kernels_.quantize_head_fp8(key, dim, numbers);
        for (int d = 0; d < dim; d++) to.keys[d * PAGE + slot] = numbers[d];
        to.value_scales[slot] = kernels_.quantize_head_fp8(value, dim, to.values + slot * dim);
    } else {
        for (int d = 0; d < dim; d++) reinterpret_cast<float*>(to.keys)[d * PAGE + slot] = key[d];
        std::memcpy(reinterpret_cast<float*>(to.values) + slot * dim, value, dim * sizeof(float));
    }
}

void Attention::partition(int thread, int layer, const float* qkv, const int32_t* rows, int count, const Read& read, const Read& next, Partial* results) {
    const int dim = model_.head_dim, part = read.part, kv_head = read.kv_head, from = part * PARTITION;
    auto* const attend = int8() ? kernels_.attend_int8 : rotated() ? kernels_.attend_fp8 : kernels_.attend_fp32;
    // The first rows may come before this partition, and the windows of the last ones after it.
    int begin = 0, end = count;
    while (begin < end && !sees(positions_[rows[begin]], part)) begin++;
    while (end > begin && !sees(positions_[rows[end - 1]], part)) end--;
    if (begin == end) return;
    int tokens = 0;
    for (int row = begin; row < end; row++) tokens = std::max(tokens, std::min(PARTITION, positions_[rows[row]] + 1 - from));
    // Pages between the sinks and the first row's window are left out: they would add zeros.
    int kept = PARTITION / PAGE, visible = kept;
    if (windowed()) {
        kept = std::clamp((model_.sinks - from + PAGE - 1) / PAGE, 0, PARTITION / PAGE);
        visible = std::clamp((std::max(0, positions_[rows[begin]] - model_.window + 1) - from) / PAGE, kept, PARTITION / PAGE);
    }
    const int left_out = (visible - kept) * PAGE;
    PageView pages[PARTITION / PAGE], upcoming[PARTITION / PAGE];
    int seen = 0;
    for (int i = 0; i * PAGE < tokens; i++) {
        if (i < kept || i >= visible) pages[seen++] = page(layer, read.pages[from / PAGE + i], kv_head);
    }
    selection_[thread].bytes_read += seen * head_bytes_;
    AttentionPart work{};
    work.pages = pages;
    work.next = upcoming;
    work.next_count = rotated() ? views(layer, next, upcoming) : 0;
    work.dim = dim;
    work.scratch = &scratch_[thread];
    Partial* targets[GROUP];
    bool begins[GROUP];
    for (int query = begin * heads_per_kv_; query < end * heads_per_kv_; query += work.count) {
        work.count = std::min(GROUP, end * heads_per_kv_ - query);
        for (int i = 0; i < work.count; i++) {
            const int row = rows[(query + i) / heads_per_kv_], of_head = (query + i) % heads_per_kv_, head = kv_head * heads_per_kv_ + of_head;
            const size_t number = static_cast<size_t>(row) * model_.heads + head;
            const int position = positions_[row];
            work.tokens[i] = std::min(PARTITION, position + 1 - from) - left_out;
            work.hidden_from[i] = std::max(0, model_.sinks - from);
            work.hidden_to[i] = windowed() ? std::min(work.tokens[i], position - model_.window + 1 - from - left_out) : 0;
            targets[i] = results ? results + query + i : stored(row, kv_head, part) + of_head;
            begins[i] = !results || part == first_part(position);
            if (int8()) {
                work.int8_queries[i] = &int8_queries_[number * dim];
                work.scales[i] = query_scales_[number];
            } else {
                work.queries[i] = qkv + static_cast<size_t>(row) * (model_.heads + 2 * model_.kv_heads) * dim + head * dim;
            }
            work.result[i].values = begins[i] ? targets[i]->values : work.scratch->results + i * dim;
        }
        attend(work);
        for (int i = 0; i < work.count; i++) {
            if (begins[i]) {
                *targets[i] = work.result[i];
            } else {
                kernels_.combine(*targets[i], work.result[i], dim);
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
        if (rotated()) kernels_.rotate(values, dim, 64);
        if (out) std::memcpy(out + (static_cast<size_t>(row) * model_.heads + head) * dim, values, dim * sizeof(float));
        kernels_.quantize(values, dim, rotation, quantized, row, head * dim);
    }
}

}  // namespace decodefleet
