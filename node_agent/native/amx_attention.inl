// Attention of many query heads to one partition in AMX's tiles: the whole numbers of attention.inl, computed sixteen queries at a time.
// Included by tier_amx.cpp after amx.inl.

namespace {

constexpr int FEWEST_QUERIES = 6;  // that are worth a tile

// Scores of 16 queries with 16 tokens: [16, 64] bytes of queries, and as many dimensions of a page's keys, added up over `dim`.
inline void score_tiles(const int8_t* queries, const uint8_t* keys, int dim, int32_t* scores, int64_t row_bytes) {
    __asm__ volatile("tilezero %%tmm0" ::);
    for (int d = 0; d < dim; d += 64) {
        __asm__ volatile(
            "tileloadd (%0, %1, 1), %%tmm4\n\t"
            "tileloadd (%2, %3, 1), %%tmm6\n\t"
            "tdpbssd %%tmm6, %%tmm4, %%tmm0"
            :
            : "r"(queries + d), "r"(static_cast<int64_t>(dim)), "r"(keys + d * PAGE), "r"(int64_t{64})
            : "memory");
    }
    __asm__ volatile("tilestored %%tmm0, (%0, %1, 1)" : : "r"(scores), "r"(row_bytes) : "memory");
}

// Sums over `tokens` (a multiple of 64) of both planes of 16 queries times 16 dimensions of the values.
inline void mix_tiles(const uint8_t* planes, const int8_t* values, int dim, int tokens, int32_t* high, int32_t* low) {
    __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm3" ::);
    for (int t = 0; t < tokens; t += 64) {
        __asm__ volatile(
            "tileloadd (%2, %3, 1), %%tmm6\n\t"
            "tileloadd (%0, %4, 1), %%tmm4\n\t"
            "tdpbusd %%tmm6, %%tmm4, %%tmm0\n\t"
            "tileloadd (%1, %4, 1), %%tmm5\n\t"
            "tdpbusd %%tmm6, %%tmm5, %%tmm3"
            :
            : "r"(planes + t), "r"(planes + t + PARTITION), "r"(values + static_cast<int64_t>(t) * dim), "r"(static_cast<int64_t>(4) * dim),
              "r"(int64_t{2 * PARTITION})
            : "memory");
    }
    __asm__ volatile(
        "tilestored %%tmm0, (%0, %2, 1)\n\t"
        "tilestored %%tmm3, (%1, %2, 1)"
        :
        : "r"(high), "r"(low), "r"(int64_t{64})
        : "memory");
}

// Up to 16 queries from number `at` on; `end`: tokens that any of them sees, up to a multiple of 64, whose values are in the scratch.
void attend_tile(AttentionPart& part, int at, int count, int end) {
    AttentionScratch& scratch = *part.scratch;
    const int tokens = most_tokens(part, at, count), dim = part.dim;
    for (int r = 0; r < count; r++) __builtin_memcpy(scratch.queries + r * dim, part.int8_queries[at + r], dim);
    for (int t = 0; t < tokens; t += PAGE) {
        const uint8_t* next = fetched(part, at, t / PAGE).keys;
        for (int i = 0; i < PAGE * dim; i += 64) __builtin_prefetch(next + i);
        score_tiles(scratch.queries, part.pages[t / PAGE].keys, dim, reinterpret_cast<int32_t*>(scratch.scores) + t, 4 * PARTITION);
    }
    float factors[AttentionScratch::QUERIES];
    for (int r = 0; r < count; r++) {
        float* scores = scratch.scores + r * PARTITION;
        uint8_t* weights = scratch.weights + 2 * PARTITION * r;
        const int own = part.tokens[at + r];
        const F16 scale = all(part.scales[at + r]);
        if (r < tokens / PAGE) {
            const uint8_t* next = fetched(part, at, r).values;
            for (int i = 0; i < PAGE * (dim + 8); i += 64) __builtin_prefetch(next + i);  // the scales lie behind
        }
        for (int t = 0; t < own; t += 16) {
            store(scores + t, to_float(I16{_mm512_loadu_si512(scores + t)}) * (load(part.pages[t / PAGE].key_scales) * scale));
        }
        hide(scores, part.hidden_from[at + r], part.hidden_to[at + r]);
        weigh(scores, own, part.result[at + r]);
        factors[r] = round_weights(scores, own, part.pages, weights);
        for (int t = (own + 15) / 16 * 16; t < end; t += 16) store_weights(weights, t, all(0.0f));
    }
    alignas(64) int32_t high[TILE_ROWS * 16], low[TILE_ROWS * 16];
    for (int d = 0; d < dim; d += 16) {
        mix_tiles(scratch.weights, scratch.values + 4 * d, dim, end, high, low);
        for (int r = 0; r < count; r++) {
            I16 sums = total({_mm512_load_si512(high + 16 * r), _mm512_load_si512(low + 16 * r)});
            store(part.result[at + r].values + d, to_float(sums) * all(factors[r]));
        }
    }
}

void amx_attend_int8(AttentionPart& part) {
    const int rest = part.count % TILE_ROWS, tiled = part.count - (rest < FEWEST_QUERIES ? rest : 0);
    if (tiled) {
        const int tokens = most_tokens(part, 0, tiled), end = (tokens + 63) / 64 * 64;
        for (int t = 0; t < tokens; t += PAGE) {  // so that 64 tokens' values lie together
            __builtin_memcpy(part.scratch->values + t * part.dim, part.pages[t / PAGE].values, PAGE * part.dim);
        }
        for (int at = 0; at < tiled; at += TILE_ROWS) attend_tile(part, at, tiled - at < TILE_ROWS ? tiled - at : TILE_ROWS, end);
    }
    attend_some<DF_KV_INT8>(part, tiled);
}

}  // namespace
