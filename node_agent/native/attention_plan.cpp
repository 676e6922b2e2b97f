// What a batch's attention consists of: tiles of rows, and the partitions that are computed before them, since rows of several sequences read them
// together, or since there are fewer tiles than threads can share.
#include <algorithm>
#include <cstring>

#include "attention.h"

namespace decodefleet {

constexpr size_t MOST_APART = 64;  // rows: with more, one phase less is not worth comparing them

void Attention::plan(const df_batch& batch) {
    plan_tiles(batch);
    if (hierarchical()) plan_selected(batch);
    const int items = static_cast<int>(tiles_.size()) * model_.kv_heads;
    split_ = most_partitions_ > 1 && items < 4 * threads_.count();
    ahead_.clear();
    if (model_.sparsity == DF_DENSE) plan_shared();
    if (split_ && !hierarchical()) plan_split();
    writes_in_tiles_ = ahead_.empty() && !hierarchical() && apart();
    const size_t queries = static_cast<size_t>(batch.rows) * model_.heads;
    if (int8()) int8_queries_.resize(queries * model_.head_dim);
    query_scales_.resize(queries);
    if (hierarchical()) return make_room(static_cast<size_t>(split_ ? items * most_partitions_ : threads_.count()) * heads_per_kv_);
    size_t states = static_cast<size_t>(threads_.count()) * TILE_ROWS * heads_per_kv_;
    for (Tile& tile : tiles_) {
        tile.stored = states;
        states += static_cast<size_t>(tile.ahead) * model_.kv_heads * tile.rows * heads_per_kv_;
    }
    make_room(states);
}

void Attention::plan_tiles(const df_batch& batch) {
    tiles_.clear();
    positions_.resize(batch.rows);
    page_of_.resize(batch.rows);
    tile_of_.resize(batch.rows);
    rows_.resize(batch.rows);
    most_partitions_ = 0;
    const int tile_rows = hierarchical() ? 1 : TILE_ROWS;
    int row = 0;
    for (int span = 0; span < batch.spans; span++) {
        const int32_t* pages = batch.pages + batch.page_offset[span];
        const int start = batch.span_start[span], end = start + batch.span_length[span];
        for (int position = start; position < end; position++, row++) {
            if ((position - start) % tile_rows == 0) {
                tiles_.push_back({row, std::min(tile_rows, end - position), position, pages});
                most_partitions_ = std::max(most_partitions_, tiles_.back().partitions());
            }
            rows_[row] = row;
            positions_[row] = position;
            page_of_[row] = pages[position / PAGE];
            tile_of_[row] = static_cast<int32_t>(tiles_.size()) - 1;
        }
    }
}

// Whether no tile reads what another's row writes: each is one row, of a sequence that has no other in the batch.
bool Attention::apart() const {
    if (tiles_.size() != positions_.size() || tiles_.size() > MOST_APART) return false;
    for (const Tile& writer : tiles_) {
        const int page = writer.start / PAGE;
        for (const Tile& reader : tiles_) {
            if (&reader != &writer && reader.start / PAGE >= page && reader.pages[page] == writer.pages[page]) return false;
        }
    }
    return true;
}

// Whole partitions, from the first one on, that sequences share page by page, for those of one row in the batch.
void Attention::plan_shared() {
    struct Reader {
        int group, tile;
    };
    std::vector<Reader> readers;
    for (int tile = 0; tile < static_cast<int>(tiles_.size()); tile++) {
        if (tiles_[tile].rows == 1) readers.push_back({0, tile});
    }
    for (int part = 0; !readers.empty(); part++) {
        const size_t at = static_cast<size_t>(part) * (PARTITION / PAGE);
        auto compared = [&](const Reader& a, const Reader& b) {
            return a.group != b.group ? a.group - b.group : std::memcmp(tiles_[a.tile].pages + at, tiles_[b.tile].pages + at, PARTITION / PAGE * sizeof(int32_t));
        };
        auto ended = [&](const Reader& reader) { return tiles_[reader.tile].start + 1 < (part + 1) * PARTITION; };
        readers.erase(std::remove_if(readers.begin(), readers.end(), ended), readers.end());
        std::sort(readers.begin(), readers.end(), [&](const Reader& a, const Reader& b) {
            const int order = compared(a, b);
            return order ? order < 0 : a.tile < b.tile;
        });
        std::vector<Reader> sharing;
        for (size_t first = 0, last; first < readers.size(); first = last) {
            for (last = first + 1; last < readers.size() && !compared(readers[first], readers[last]);) last++;
            for (size_t i = first; last - first > 1 && i < last; i++) {
                if ((i - first) % TILE_ROWS == 0) ahead_.push_back({part, static_cast<int>(rows_.size()), 0, tiles_[readers[i].tile].pages});
                ahead_.back().count++;
                rows_.push_back(tiles_[readers[i].tile].first_row);
                tiles_[readers[i].tile].ahead = part + 1;
                sharing.push_back({static_cast<int>(first), readers[i].tile});
            }
        }
        readers = sharing;
    }
}

void Attention::plan_split() {
    for (Tile& tile : tiles_) {
        for (; tile.ahead < tile.partitions(); tile.ahead++) ahead_.push_back({tile.ahead, tile.first_row, tile.rows, tile.pages});
    }
}

void Attention::make_room(size_t states) {
    if (partials_.size() >= states) return;
    partials_.resize(states);
    values_.resize(states * model_.head_dim);
    for (size_t i = 0; i < states; i++) partials_[i].values = &values_[i * model_.head_dim];
}

}  // namespace decodefleet
