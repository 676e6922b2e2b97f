// Attention of a batch over the paged pool: writes its rows' keys and values, then reads all of them from there.
#pragma once

#include <vector>

#include "kernels.h"
#include "threads.h"

namespace decodefleet {

class Attention {
  public:
    Attention(const df_model& model, const Kernels& kernels, Threads& threads);

    // Of a page's summary: signs, sizes, a scale.
    static constexpr int sketch_bytes(int head_dim) { return head_dim + PAGE + 4; }

    // Bytes of one key-value head's keys and values of a page.
    static int64_t head_bytes(const df_model& model);

    void set_pool(uint8_t* pool, int64_t pages);

    // Before the threads run: what all layers share.
    void plan(const df_batch& batch);

    // On every thread. `qkv`: [rows, (heads + 2 * kv_heads) * head_dim]. Fills `out`, the same rows' [heads * head_dim], where it is
    // wanted, and `quantized`, rotated as the output projection has it.
    void run(int thread, int layer, float* qkv, const Activations& quantized, int rotation, float* out);

    // From the pool, since the beginning.
    int64_t bytes_read() const;

  private:
    static constexpr int TILE_ROWS = 16;
    struct Tile {  // rows of one sequence
        int first_row, rows, start;
        const int32_t* pages;
        int ahead = 0;  // partitions, from the first one on, that are computed before the tile is
        size_t stored = 0;  // where their results begin in `partials_`: [kv_heads, ahead, rows, heads of a key-value head]
        int partitions() const { return (start + rows - 1) / PARTITION + 1; }
    };

    // A partition that some rows read, of one sequence or of several that share its pages; computed before their tiles.
    struct Ahead {
        int part;
        int first, count;  // in `rows_`
        const int32_t* pages;
    };

    struct Read {  // of one head's pages of a partition
        const int32_t* pages;  // of the sequence
        int part, kv_head, last;  // position that is read
    };

    struct Node {  // of summaries
        const int32_t* pages;
        int last;  // page
    };
    struct Rest {  // pages between the sinks and the window, and how many of them a row reads
        int begin, end, picks;
    };
    struct alignas(64) Scratch {  // of a thread that selects
        std::vector<int16_t> query;
        std::vector<int32_t> nodes, kept;
        std::vector<uint64_t> ranks;
        std::vector<const uint8_t*> ends;
        std::vector<int8_t> sums;  // [heads of a key-value head, head_dim / 8, 16]
        std::vector<float> scales, scores;
        int64_t bytes_read = 0;
    };

    bool int8() const { return model_.kv_format == DF_KV_INT8; }
    bool rotated() const { return model_.kv_format != DF_KV_FP32; }  // keys and values, with a scale for each token
    bool hierarchical() const { return model_.sparsity == DF_HIERARCHICAL; }
    Rest rest(int position) const;
    int selected_pages(const Tile& tile) const;
    void plan_selected(const df_batch& batch);
    uint8_t* summary(int layer, const int32_t* pages, int level, int last, int kv_head) const;
    void slow_half(float* x) const;
    void read_key(const PageView& page, int slot, float* key) const;
    void sketch(int layer, const Node& node, int kv_head);
    void enclose(int layer, const Node& node, int level, int kv_head);
    void page_box(const PageView& page, float* ends) const;
    void query_for_boxes(size_t first, std::vector<int16_t>& query) const;
    void queries_for_sketches(size_t first, Scratch& scratch) const;
    void score_boxes(Scratch& scratch) const;
    void score_sketches(Scratch& scratch) const;
    void select(int thread, int layer, const Tile& tile, int kv_head, int32_t* picks);
    void selected_partition(int thread, int layer, const Tile& tile, int kv_head, int part, Partial* all);
    void run_selected(int thread, int layer, const Activations& quantized, int rotation, float* out);
    bool windowed() const { return model_.sparsity == DF_SLIDING_WINDOW; }
    // Whether a row sees any token of a partition, and the first one of which it does.
    bool sees(int position, int part) const;
    int first_part(int position) const;
    void write(int layer, int row, int kv_head, float* qkv);
    void plan_tiles(const df_batch& batch);
    bool apart() const;
    void plan_shared();
    void plan_split();
    void make_room(size_t states);
    Partial* stored(int row, int kv_head, int part);
    // Attention of rows to a partition, added to `results`, [count, heads of a key-value head]; stored ahead where these are null.
    void partition(int thread, int layer, const float* qkv, const int32_t* rows, int count, const Read& read, const Read& next, Partial* results);
    void finish(const Tile& tile, int kv_head, const Partial* all, const Activations& quantized, int rotation, float* out);
    PageView page(int layer, int32_t page, int kv_head) const;
    Read of_tile(int item) const;
    int views(int layer, const Read& read, PageView* views) const;
    void merge(const Tile& tile, int kv_head, int part, Partial* all);

    const df_model& model_;
    const Kernels& kernels_;
    Threads& threads_;
    const int heads_per_kv_;
    const int64_t head_bytes_;
    uint8_t* pool_ = nullptr;
    int64_t pages_ = 0;
    bool split_ = false;  // partitions of a tile are items of their own
    bool writes_in_tiles_ = false;  // rows' keys and values, when a tile begins: no other reads them
    int most_partitions_ = 0;
    std::vector<Tile> tiles_;
    std::vector<Ahead> ahead_;
    std::vector<int32_t> rows_;  // [rows] their own numbers, then those that share a partition
    std::vector<int32_t> positions_, page_of_, tile_of_;  // [rows]
    std::vector<int8_t> int8_queries_;  // [rows, heads, head_dim]
    std::vector<float> query_scales_;  // [rows, heads], times log2(e) / sqrt(head_dim)
    std::vector<AttentionScratch> scratch_;  // [threads]
    std::vector<Partial> partials_;  // [threads, queries of a tile], then those stored ahead
    std::vector<float> values_;
    static constexpr int LEVELS = 7;  // of summaries: 4 million tokens
    int most_picks_ = 0;
    std::vector<int32_t> picks_;  // [rows, kv_heads, most_picks_] pages of the sequence
    std::vector<Node> completed_[LEVELS];  // nodes that the batch completes
    std::vector<Scratch> selection_;  // [threads]
};

}  // namespace decodefleet
