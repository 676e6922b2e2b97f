// Hierarchical sparsity: summaries of keys, the pages that a row picks by them, and its attention to these.
//
// A summary is a box: a high and a low value of each dimension, four bits each, with one scale. A page's box is around the middle of its keys, half
// as wide as they reach: a page is worth about what its keys reach, not what no single key does. A node's box is around those of the
// eight below it. Boxes lie along the model's own dimensions, in which keys have outliers: stored keys are rotated, which spreads each
// over all dimensions and would make every box wide. Level 1 is in the page itself. A node of level n > 1 is in the page n - 2 after its last one: what a page holds
// follows from the tokens up to its end, so whoever shares pages shares summaries, and each page has room for two.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "attention.h"

namespace decodefleet {

namespace {

constexpr int FAN = 8;  // children of a node
constexpr int WIDEST = 256;  // values of a summary

// Pages of a node.
int64_t span_of(int level) { return int64_t{1} << 3 * (level - 1); }

// Orders as the scores do, and before the same score of a later node.
uint64_t rank(float score, int node) {
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(bits) << 32 | ~static_cast<uint32_t>(node);
}

// The nodes of the `count` highest ranks, in ascending order.
void keep_best(std::vector<uint64_t>& ranks, int count, std::vector<int32_t>& nodes) {
    std::nth_element(ranks.begin(), ranks.begin() + count - 1, ranks.end(), std::greater<uint64_t>());
    nodes.clear();
    for (int i = 0; i < count; i++) nodes.push_back(static_cast<int32_t>(~static_cast<uint32_t>(ranks[i])));
    std::sort(nodes.begin(), nodes.end());
}

}  // namespace

Attention::Rest Attention::rest(int position) const {
    int begin = (model_.sinks + PAGE - 1) / PAGE, end = std::max(begin, std::max(0, position - model_.window + 1) / PAGE);
    return {begin, end, std::min(end - begin, model_.budget / PAGE)};
}

int Attention::selected_pages(const Tile& tile) const {
    const Rest rest = this->rest(tile.start);
    return tile.start / PAGE + 1 - (rest.end - rest.begin - rest.picks > 0 ? rest.end - rest.begin - rest.picks : 0);
}

void Attention::plan_selected(const df_batch& batch) {
    for (auto& nodes : completed_) nodes.clear();
    most_partitions_ = 1, most_picks_ = 0;
    for (const Tile& tile : tiles_) {
        most_partitions_ = std::max(most_partitions_, (selected_pages(tile) + PARTITION / PAGE - 1) / (PARTITION / PAGE));
        most_picks_ = std::max(most_picks_, rest(tile.start).picks);
    }
    picks_.resize(tiles_.size() * model_.kv_heads * most_picks_);
    for (int span = 0; span < batch.spans; span++) {
        const int32_t* pages = batch.pages + batch.page_offset[span];
        const int end = (batch.span_start[span] + batch.span_length[span]) / PAGE;
        for (int page = batch.span_start[span] / PAGE; page < end; page++) {
            completed_[0].push_back({pages, page});
            for (int level = 2; level <= LEVELS; level++) {
                const int last = page - (level - 2);
                if (last + 1 >= span_of(level) && (last + 1) % span_of(level) == 0) completed_[level - 1].push_back({pages, last});
            }
        }
    }
}

uint8_t* Attention::summary(int layer, const int32_t* pages, int level, int last, int kv_head) const {
    uint8_t* both = reinterpret_cast<uint8_t*>(page(layer, pages[last + std::max(0, level - 2)], kv_head).summaries);
    return both + (level > 1 ? model_.head_dim + 4 : 0);
}

void Attention::summarise(int layer, const Node& node, int level, int kv_head) {
    const int dim = model_.head_dim;
    float ends[WIDEST], below[WIDEST];  // high values, then low
    const PageView keys = page(layer, node.pages[node.last], kv_head);
    for (int child = 0; child < (level == 1 ? PAGE : FAN); child++) {
        if (level == 1) {
            for (int d = 0; d < dim; d++) below[d] = reinterpret_cast<int8_t*>(keys.keys)[d / 4 * 4 * PAGE + child * 4 + d % 4] * keys.key_scales[child];
            kernels_.rotate(below, dim, 64);
            std::memcpy(below + dim, below, dim * sizeof(float));
        } else {
            const uint8_t* box = summary(layer, node.pages, level - 1, node.last - child * static_cast<int>(span_of(level - 1)), kv_head);
            float scale;
            std::memcpy(&scale, box + dim, 4);
            for (int d = 0; d < dim; d++) below[d] = ((box[d] & 15) - 8) * scale, below[dim + d] = ((box[d] >> 4) - 8) * scale;
        }
        for (int d = 0; d < dim; d++) {
            ends[d] = child ? std::max(ends[d], below[d]) : below[d];
            ends[dim + d] = child ? std::min(ends[dim + d], below[dim + d]) : below[dim + d];
        }
    }
    for (int d = 0; level == 1 && d < dim; d++) {
        const float high = ends[d], low = ends[dim + d];
        ends[d] = 0.75f * high + 0.25f * low;
        ends[dim + d] = 0.25f * high + 0.75f * low;
    }
    float largest = 0;
    for (int d = 0; d < 2 * dim; d++) largest = std::max(largest, std::fabs(ends[d]));
    const float scale = largest / 7, steps = largest > 0 ? 7 / largest : 0;
    auto four_bits = [&](float value) { return static_cast<int>(std::nearbyint(value * steps)) + 8; };
    uint8_t* to = summary(layer, node.pages, level, node.last, kv_head);
    for (int d = 0; d < dim; d++) to[d] = static_cast<uint8_t>(four_bits(ends[d]) | four_bits(ends[dim + d]) << 4);
    std::memcpy(to + dim, &scale, 4);
}

// What meets a box for all query heads of a row together: the sums of their positive values, which meet the high ones, and of their
// negative values, which meet the low ones. Without a scale, which would not change the order.
void Attention::query_for_boxes(size_t first, std::vector<int16_t>& query) const {
    const int dim = model_.head_dim;
    float sums[WIDEST] = {}, values[WIDEST / 2], largest = 0;
    for (int head = 0; head < heads_per_kv_; head++) {
        for (int d = 0; d < dim; d++) values[d] = int8_queries_[(first + head) * dim + d] * query_scales_[first + head];
        kernels_.rotate(values, dim, 64);
        for (int d = 0; d < dim; d++) sums[values[d] > 0 ? d : dim + d] += values[d];
    }
    for (int d = 0; d < 2 * dim; d++) largest = std::max(largest, std::fabs(sums[d]));
    const float scale = largest > 0 ? 32767 / largest : 0;
    query.resize(2 * dim);
    for (int d = 0; d < 2 * dim; d++) query[d] = static_cast<int16_t>(std::nearbyint(sums[d] * scale));
}

void Attention::select(int thread, int layer, const Tile& tile, int kv_head, int32_t* picks) {
    const Rest rest = this->rest(tile.start);
    const int dim = model_.head_dim, pages = model_.budget / PAGE, beam = std::max(2, (pages + 1) / 2);  // four children for each page
    if (rest.end - rest.begin <= pages) return std::iota(picks, picks + rest.picks, rest.begin);
    auto count = [&](int level) { return level == 1 ? rest.end : static_cast<int>(std::max(0, rest.end - level + 2) / span_of(level)); };
    Scratch& scratch = selection_[thread];
    std::vector<int32_t>&nodes = scratch.nodes, &kept = scratch.kept;
    query_for_boxes(static_cast<size_t>(tile.first_row) * model_.heads + kv_head * heads_per_kv_, scratch.query);
    int level = LEVELS;
    while (level > 1 && !count(level)) level--;
    kept.clear();
    for (int above = 0; level >= 1; above = count(level), level--) {
        nodes.clear();
        for (int node : kept)
            for (int child = 0; child < FAN; child++) nodes.push_back(node * FAN + child);
        for (int node = above * FAN; node < count(level); node++) nodes.push_back(node);
        nodes.erase(std::remove_if(nodes.begin(), nodes.end(), [&](int node) { return (node + 1) * span_of(level) <= rest.begin; }), nodes.end());
        const int room = level == 1 ? pages : beam;
        if (static_cast<int>(nodes.size()) <= room) {
            kept = nodes;
            continue;
        }
        scratch.ranks.clear();
        scratch.ends.clear();
        for (int node : nodes) {
            scratch.ends.push_back(summary(layer, tile.pages, level, static_cast<int>((node + 1) * span_of(level)) - 1, kv_head));
            for (int at = 0; at < dim + 4; at += 64) __builtin_prefetch(scratch.ends.back() + at);
        }
        for (size_t i = 0; i < nodes.size(); i++) {
            const uint8_t* ends = scratch.ends[i];
            float scale;
            std::memcpy(&scale, ends + dim, 4);
            scratch.ranks.push_back(rank(static_cast<float>(kernels_.score_summary(scratch.query.data(), ends, dim)) * scale, nodes[i]));
        }
        scratch.bytes_read += static_cast<int64_t>(nodes.size()) * (dim + 4);
        keep_best(scratch.ranks, room, kept);
    }
    std::copy(kept.begin(), kept.end(), picks);
}

// One row's attention to the next 16 of the pages that it reads.
void Attention::selected_partition(int thread, int layer, const Tile& tile, int kv_head, int part, Partial* all) {
    const Rest rest = this->rest(tile.start);
    const int dim = model_.head_dim, total = selected_pages(tile), begin = part * (PARTITION / PAGE);
    const int end = std::min(total, begin + PARTITION / PAGE);
    const int32_t* picks = &picks_[(static_cast<size_t>(tile.first_row) * model_.kv_heads + kv_head) * most_picks_];
    PageView pages[PARTITION / PAGE];
    for (int i = begin; i < end; i++) {
        const int index = i < rest.begin ? i : i < rest.begin + rest.picks ? picks[i - rest.begin] : rest.end + i - rest.begin - rest.picks;
        pages[i - begin] = page(layer, tile.pages[index], kv_head);
    }
    selection_[thread].bytes_read += static_cast<int64_t>(end - begin) * PAGE * (2 * dim + 8);
    AttentionPart work{};
    work.pages = pages;
    work.dim = dim;
    work.scratch = &scratch_[thread];
    for (int query = 0; query < heads_per_kv_; query += work.count) {
        work.count = std::min(GROUP, heads_per_kv_ - query);
        for (int i = 0; i < work.count; i++) {
            const size_t number = static_cast<size_t>(tile.first_row) * model_.heads + kv_head * heads_per_kv_ + query + i;
            work.tokens[i] = (end == total ? (end - 1 - begin) * PAGE + tile.start % PAGE + 1 : PARTITION);
            work.int8_queries[i] = &int8_queries_[number * dim];
            work.scales[i] = query_scales_[number];
            work.result[i].values = split_ || !part ? all[query + i].values : work.scratch->results + i * dim;
        }
        kernels_.attend_int8(work);
        for (int i = 0; i < work.count; i++) {
            if (split_ || !part) {
                all[query + i] = work.result[i];
            } else {
                kernels_.combine(all[query + i], work.result[i], dim);
            }
        }
    }
}

void Attention::run_selected(int thread, int layer, const Activations& quantized, int rotation, float* out) {
    const int kv_heads = model_.kv_heads, items = static_cast<int>(tiles_.size()) * kv_heads;
    for (int level = 1; level <= LEVELS; level++) {
        const std::vector<Node>& nodes = completed_[level - 1];
        if (nodes.empty()) continue;
        threads_.phase(static_cast<int>(nodes.size()) * kv_heads, [&](int item) { summarise(layer, nodes[item / kv_heads], level, item % kv_heads); });
    }
    auto choose = [&](int item) {
        if (most_picks_) select(thread, layer, tiles_[item / kv_heads], item % kv_heads, &picks_[static_cast<size_t>(item) * most_picks_]);
    };
    auto parts = [&](const Tile& tile) { return (selected_pages(tile) + PARTITION / PAGE - 1) / (PARTITION / PAGE); };
    if (split_) {
        if (most_picks_) threads_.phase(items, choose);
        threads_.phase(items * most_partitions_, [&](int item) {
            const Tile& tile = tiles_[item / most_partitions_ / kv_heads];
            const int part = item % most_partitions_;
            if (part < parts(tile)) selected_partition(thread, layer, tile, item / most_partitions_ % kv_heads, part, &partials_[static_cast<size_t>(item) * heads_per_kv_]);
        });
    }
    threads_.phase(items, [&](int item) {
        const Tile& tile = tiles_[item / kv_heads];
        Partial* all = &partials_[static_cast<size_t>(split_ ? item * most_partitions_ : thread) * heads_per_kv_];
        if (!split_) choose(item);
        for (int part = 0; part < parts(tile); part++) {
            if (!split_) {
                selected_partition(thread, layer, tile, item % kv_heads, part, all);
                continue;
            }
            for (int query = 0; part && query < heads_per_kv_; query++) kernels_.combine(all[query], all[part * heads_per_kv_ + query], model_.head_dim);
        }
        finish(tile, item % kv_heads, all, quantized, rotation, out);
    });
}

int64_t Attention::bytes_read() const {
    int64_t sum = 0;
    for (const Scratch& scratch : selection_) sum += scratch.bytes_read;
    return sum;
}

}  // namespace decodefleet
