// Hierarchical sparsity: summaries of keys, the pages that a row picks by them, and its attention to these.
//
// A page has a sketch of its keys, each less the mean of the sequence's first ones: one sign each of the dimensions that turn slowest with the
// position, mixed, and a size. Queries meet each key of it, so a page is worth what it would get of their softmax.
// Above are nodes of eight, with boxes: a high and a low value of each dimension, four bits each, with one scale. A page's box is around
// the middle of its keys, half as wide as they reach; a node's box is around those below it. Both lie along the model's own dimensions, in
// which keys have outliers: stored keys are rotated, which spreads each over all dimensions and would make every box wide.
// The sketch is in the page itself, a node of level n > 1 in the page n - 2 after its last one: what a page holds
// follows from the tokens up to its end, so whoever shares pages shares summaries, and each page has room for both.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "attention.h"

namespace decodefleet {

namespace {

constexpr int FAN = 8;  // children of a node
constexpr int CENTRE_PAGES = 8;  // the first ones, whose keys' mean sketches leave out

// Pages of a node.
int64_t span_of(int level) { return int64_t{1} << 3 * (level - 1); }

// The nearest whole number within ± most; -most for NaN.
int whole(float value, int most) {
    const float bound = static_cast<float>(most);
    return static_cast<int>(std::lrint(std::min(bound, std::max(-bound, value))));
}

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

// A page's sketch, or the box of a node above.
uint8_t* Attention::summary(int layer, const int32_t* pages, int level, int last, int kv_head) const {
    uint8_t* both = reinterpret_cast<uint8_t*>(page(layer, pages[last + std::max(0, level - 2)], kv_head).summaries);
    return both + (level > 1 ? sketch_bytes(model_.head_dim) : 0);
}

// The half of a head's dimensions that turn slowest with the position, each spread over all of them, in place of the first half.
void Attention::slow_half(float* x) const {
    const int dim = model_.head_dim, quarter = dim / 4;
    kernels_.rotate(x, dim, 64);
    std::memmove(x, x + quarter, quarter * sizeof(float));
    std::memcpy(x + quarter, x + 3 * quarter, quarter * sizeof(float));
    kernels_.rotate(x, 2 * quarter, 2 * quarter % 64 ? 32 : 64);
}

void Attention::read_key(const PageView& page, int slot, float* key) const {
    for (int d = 0; d < model_.head_dim; d += 4)
        for (int i = 0; i < 4; i++) key[d + i] = reinterpret_cast<int8_t*>(page.keys)[d * PAGE + slot * 4 + i] * page.key_scales[slot];
}

void Attention::sketch(int layer, const Node& node, int kv_head) {
    const int dim = model_.head_dim, before = std::min(node.last + 1, CENTRE_PAGES);
    float centre[MOST_DIM] = {}, key[MOST_DIM], sizes[PAGE], largest = 0;
    for (int i = 0; i < before * PAGE; i++) {
        read_key(page(layer, node.pages[i / PAGE], kv_head), i % PAGE, key);
        for (int d = 0; d < dim; d++) centre[d] += key[d];
    }
    uint8_t* to = summary(layer, node.pages, 1, node.last, kv_head);
    std::memset(to, 0, dim);
    for (int slot = 0; slot < PAGE; slot++) {
        read_key(page(layer, node.pages[node.last], kv_head), slot, key);
        for (int d = 0; d < dim; d++) key[d] -= centre[d] / static_cast<float>(before * PAGE);
        slow_half(key);
        sizes[slot] = 0;
        for (int d = 0; d < dim / 2; d++) {
            sizes[slot] += std::fabs(key[d]);
            to[d / 8 * PAGE + slot] |= static_cast<uint8_t>((key[d] >= 0) << d % 8);
        }
        largest = std::max(largest, sizes[slot]);
    }
    const float steps = largest > 0 ? 255 / largest : 0;
    for (int slot = 0; slot < PAGE; slot++) to[dim + slot] = static_cast<uint8_t>(whole(sizes[slot] * steps, 255));
    std::memcpy(to + dim + PAGE, &largest, 4);
}

// Of a node of level 2 or above.
void Attention::enclose(int layer, const Node& node, int level, int kv_head) {
    const int dim = model_.head_dim;
    float ends[2 * MOST_DIM], below[2 * MOST_DIM];  // high values, then low
    for (int child = 0; child < FAN; child++) {
        const int last = node.last - child * static_cast<int>(span_of(level - 1));
        if (level == 2) {
            page_box(page(layer, node.pages[last], kv_head), below);
        } else {
            const uint8_t* box = summary(layer, node.pages, level - 1, last, kv_head);
            float scale;
            std::memcpy(&scale, box + dim, 4);
            for (int d = 0; d < dim; d++) below[d] = ((box[d] & 15) - 8) * scale, below[dim + d] = ((box[d] >> 4) - 8) * scale;
        }
        for (int d = 0; d < dim; d++) {
            ends[d] = child ? std::max(ends[d], below[d]) : below[d];
            ends[dim + d] = child ? std::min(ends[dim + d], below[dim + d]) : below[dim + d];
        }
    }
    float largest = 0;
    for (int d = 0; d < 2 * dim; d++) largest = std::max(largest, std::fabs(ends[d]));
    const float scale = largest / 7, steps = largest > 0 ? 7 / largest : 0;
    uint8_t* to = summary(layer, node.pages, level, node.last, kv_head);
    for (int d = 0; d < dim; d++) to[d] = static_cast<uint8_t>(whole(ends[d] * steps, 7) + 8 | (whole(ends[dim + d] * steps, 7) + 8) << 4);
    std::memcpy(to + dim, &scale, 4);
}

void Attention::page_box(const PageView& page, float* ends) const {
    const int dim = model_.head_dim;
    float key[MOST_DIM];
    for (int slot = 0; slot < PAGE; slot++) {
        read_key(page, slot, key);
        kernels_.rotate(key, dim, 64);
        for (int d = 0; d < dim; d++) {
            ends[d] = slot ? std::max(ends[d], key[d]) : key[d];
            ends[dim + d] = slot ? std::min(ends[dim + d], key[d]) : key[d];
        }
    }
    for (int d = 0; d < dim; d++) {
        const float high = ends[d], low = ends[dim + d];
        ends[d] = 0.75f * high + 0.25f * low;
        ends[dim + d] = 0.25f * high + 0.75f * low;
    }
}

// What meets a box for all query heads of a row together: the sums of their positive values, which meet the high ones, and of their
// negative values, which meet the low ones. Without a scale, which would not change the order.
void Attention::query_for_boxes(size_t first, std::vector<int16_t>& query) const {
    const int dim = model_.head_dim;
    float sums[2 * MOST_DIM] = {}, values[MOST_DIM], largest = 0;
    for (int head = 0; head < heads_per_kv_; head++) {
        for (int d = 0; d < dim; d++) values[d] = int8_queries_[(first + head) * dim + d] * query_scales_[first + head];
        kernels_.rotate(values, dim, 64);
        for (int d = 0; d < dim; d++) sums[values[d] > 0 ? d : dim + d] += values[d];
    }
    for (int d = 0; d < 2 * dim; d++) largest = std::max(largest, std::fabs(sums[d]));
    const float scale = largest > 0 ? 32767 / largest : 0;
    query.resize(2 * dim);
    for (int d = 0; d < 2 * dim; d++) query[d] = static_cast<int16_t>(whole(sums[d] * scale, 32767));
}

// What meets a sketch, for each query head: the sums of every four values with each choice of signs.
void Attention::queries_for_sketches(size_t first, Scratch& scratch) const {
    const int dim = model_.head_dim, half = dim / 2;
    scratch.sums.resize(heads_per_kv_ * half * 4);
    scratch.scales.resize(heads_per_kv_);
    for (int head = 0; head < heads_per_kv_; head++) {
        float values[MOST_DIM], largest = 0;
        for (int d = 0; d < dim; d++) values[d] = int8_queries_[(first + head) * dim + d];
        slow_half(values);
        for (int d = 0; d < half; d++) largest = std::max(largest, std::fabs(values[d]));
        // A sum of four stays within a byte. Sizes are sums over all dimensions, in 255 parts of the page's largest.
        const float steps = largest > 0 ? 31 / largest : 0;
        scratch.scales[head] = query_scales_[first + head] * largest / static_cast<float>(31 * 255 * half);
        for (int group = 0; group < half / 4; group++) {
            int8_t* sums = &scratch.sums[(head * (half / 4) + group) * 16];
            sums[0] = 0;
            for (int i = 0; i < 4; i++) {
                const int value = whole(values[4 * group + i] * steps, 31);
                for (int signs = 0; signs < 1 << i; signs++) {
                    sums[signs | 1 << i] = static_cast<int8_t>(sums[signs] + value);
                    sums[signs] = static_cast<int8_t>(sums[signs] - value);
                }
            }
        }
    }
}

void Attention::score_boxes(Scratch& scratch) const {
    scratch.ranks.clear();
    for (size_t i = 0; i < scratch.nodes.size(); i++) {
        float scale;
        std::memcpy(&scale, scratch.ends[i] + model_.head_dim, 4);
        const int32_t score = kernels_.score_summary(scratch.query.data(), scratch.ends[i], model_.head_dim);
        scratch.ranks.push_back(rank(static_cast<float>(score) * scale, scratch.nodes[i]));
    }
}

void Attention::score_sketches(Scratch& scratch) const {
    const int count = static_cast<int>(scratch.nodes.size()), stride = (count + 15) / 16 * 16, half = model_.head_dim / 2;
    scratch.scores.assign(static_cast<size_t>(heads_per_kv_ + 1) * stride, -INFINITY);
    float* total = scratch.scores.data() + heads_per_kv_ * stride;
    std::fill(total, total + stride, 0.0f);
    for (int head = 0; head < heads_per_kv_; head++) {
        float* scores = scratch.scores.data() + head * stride;
        kernels_.score_sketches(&scratch.sums[head * half * 4], scratch.ends.data(), count, model_.head_dim, scratch.scales[head], scores);
        kernels_.add_softmax(scores, stride, total);
    }
    scratch.ranks.clear();
    for (int i = 0; i < count; i++) scratch.ranks.push_back(rank(total[i], scratch.nodes[i]));
}

void Attention::select(int thread, int layer, const Tile& tile, int kv_head, int32_t* picks) {
    const Rest rest = this->rest(tile.start);
    const int dim = model_.head_dim, pages = model_.budget / PAGE, beam = std::max(2, (pages + 1) / 2);  // four children for each page
    if (rest.end - rest.begin <= pages) return std::iota(picks, picks + rest.picks, rest.begin);
    auto count = [&](int level) { return level == 1 ? rest.end : static_cast<int>(std::max(0, rest.end - level + 2) / span_of(level)); };
    Scratch& scratch = selection_[thread];
    std::vector<int32_t>&nodes = scratch.nodes, &kept = scratch.kept;
    const size_t first_query = static_cast<size_t>(tile.first_row) * model_.heads + kv_head * heads_per_kv_;
    query_for_boxes(first_query, scratch.query);
    queries_for_sketches(first_query, scratch);
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
        scratch.ends.clear();
        const int bytes = level > 1 ? dim + 4 : sketch_bytes(dim);
        for (int node : nodes) {
            scratch.ends.push_back(summary(layer, tile.pages, level, static_cast<int>((node + 1) * span_of(level)) - 1, kv_head));
            for (int at = 0; at < bytes; at += 64) __builtin_prefetch(scratch.ends.back() + at);
        }
        scratch.bytes_read += static_cast<int64_t>(nodes.size()) * bytes;
        level > 1 ? score_boxes(scratch) : score_sketches(scratch);
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
    PageView pages[2 * PARTITION / PAGE];  // and those of the next partition
    const int upcoming = std::min(total, end + PARTITION / PAGE) - end;
    for (int i = begin; i < end + upcoming; i++) {
        const int index = i < rest.begin ? i : i < rest.begin + rest.picks ? picks[i - rest.begin] : rest.end + i - rest.begin - rest.picks;
        pages[i - begin] = page(layer, tile.pages[index], kv_head);
    }
    selection_[thread].bytes_read += static_cast<int64_t>(end - begin) * PAGE * (2 * dim + 8);
    AttentionPart work{};
    work.pages = pages;
    work.next = pages + (end - begin);
    work.next_count = upcoming;
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
        threads_.phase(static_cast<int>(nodes.size()) * kv_heads, [&](int item) {
            const Node& node = nodes[item / kv_heads];
            level > 1 ? enclose(layer, node, level, item % kv_heads) : sketch(layer, node, item % kv_heads);
        });
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
