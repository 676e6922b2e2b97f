// Attention of a few query heads to one partition of one head's keys and values. Included by kernels.inl.

constexpr float NOTHING = -__builtin_inff();

// Nothing in place of the scores of tokens that a query does not see.
inline void hide(float* scores, int from, int to) {
    for (int t = from / 16 * 16; t < to; t += 16) {
        F16 seen = load(scores + t);
        store(scores + t, first(to - t, first(from - t, seen, all(NOTHING)), seen));
    }
}

// Softmax weights of a partition's scores in place, zero beyond `tokens`; `end` is a multiple of 16.
inline void weigh(float* scores, int tokens, int end, Partial& result) {
    F16 top = all(NOTHING);
    for (int t = 0; t < end; t += 16) {
        F16 seen = first(tokens - t, load(scores + t), all(NOTHING));
        store(scores + t, seen);
        top = max(top, seen);
    }
    result.top = largest(top);
    F16 total = all(0.0f);
    for (int t = 0; t < end; t += 16) {
        F16 weight = first(tokens - t, exponential(load(scores + t) - all(result.top)), all(0.0f));
        total = total + weight;
        store(scores + t, weight);
    }
    result.sum = sum(total);
}

template <int R>
void score_int8(AttentionPart& part, int end) {
    const int8_t* queries[R];
    int32_t sums[R];
    for (int r = 0; r < R; r++) {
        queries[r] = part.int8_queries[r];
        sums[r] = sum_int8(queries[r], part.dim);
    }
    for (int t = 0; t < end; t += PAGE) {
        const PageView& page = part.pages[t / PAGE];
        I16 dot[R];
        dot_bytes<R>(reinterpret_cast<const int8_t*>(page.keys), 4 * PAGE, part.dim / 4, queries, sums, dot);
        F16 scale = load(page.key_scales);
        for (int r = 0; r < R; r++) store(part.scratch + r * PARTITION + t, to_float(dot[r]) * (scale * all(part.scales[r])));
    }
}

template <int R>
void score_fp32(AttentionPart& part, int end) {
    for (int t = 0; t < end; t += PAGE) {
        const float* keys = reinterpret_cast<const float*>(part.pages[t / PAGE].keys);
        F16 dot[R];
        for (int r = 0; r < R; r++) dot[r] = all(0.0f);
        for (int d = 0; d < part.dim; d++) {
            F16 key = load(keys + d * PAGE);
            for (int r = 0; r < R; r++) dot[r] = fma(all(part.queries[r][d]), key, dot[r]);
        }
        for (int r = 0; r < R; r++) store(part.scratch + r * PARTITION + t, dot[r]);
    }
}

template <int R, bool INT8>
void mix(AttentionPart& part, int tokens) {
    for (int d = 0; d < part.dim; d += 16 * MIXED_TOGETHER) {
        F16 acc[R][MIXED_TOGETHER];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < MIXED_TOGETHER; i++) acc[r][i] = all(0.0f);
        for (int from = 0; from < tokens; from += PAGE) {
            const uint8_t* values = part.pages[from / PAGE].values;
            for (int t = from; t < tokens && t < from + PAGE; t++) {
                for (int i = 0; i < MIXED_TOGETHER; i++) {
                    int at = (t - from) * part.dim + d + 16 * i;
                    F16 value = INT8 ? load_int8(reinterpret_cast<const int8_t*>(values) + at) : load(reinterpret_cast<const float*>(values) + at);
                    for (int r = 0; r < R; r++) acc[r][i] = fma(all(part.scratch[r * PARTITION + t]), value, acc[r][i]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < MIXED_TOGETHER; i++) store(part.result[r].values + d + 16 * i, acc[r][i]);
    }
}

// A query beside one that sees more tokens adds zeros for those, which changes nothing.
template <int R, bool INT8>
void attend(AttentionPart& part) {
    int tokens = 0;
    for (int r = 0; r < R; r++) tokens = tokens < part.tokens[r] ? part.tokens[r] : tokens;
    int end = (tokens + PAGE - 1) / PAGE * PAGE;
    INT8 ? score_int8<R>(part, end) : score_fp32<R>(part, end);
    for (int r = 0; r < R; r++) {
        float* scores = part.scratch + r * PARTITION;
        hide(scores, part.hidden_from[r], part.hidden_to[r]);
        weigh(scores, part.tokens[r], end, part.result[r]);
        if (!INT8) continue;
        for (int t = 0; t < end; t += 16) {
            // What another sequence left in a scale may be anything.
            F16 scale = first(tokens - t, load(part.pages[t / PAGE].value_scales), all(0.0f));
            store(scores + t, load(scores + t) * scale);
        }
    }
    mix<R, INT8>(part, tokens);
}

void attend_int8(AttentionPart& part) {
    part.count == 3 ? attend<3, true>(part) : part.count == 2 ? attend<2, true>(part) : attend<1, true>(part);
}

void attend_fp32(AttentionPart& part) {
    part.count == 3 ? attend<3, false>(part) : part.count == 2 ? attend<2, false>(part) : attend<1, false>(part);
}

void combine(Partial& all_before, const Partial& next, int dim) {
    float top = all_before.top > next.top ? all_before.top : next.top;
    float before = exponential(all_before.top - top), after = exponential(next.top - top);
    all_before.top = top;
    all_before.sum = all_before.sum * before + next.sum * after;
    for (int d = 0; d < dim; d += 16) {
        F16 old = load(all_before.values + d) * all(before);
        store(all_before.values + d, fma(load(next.values + d), all(after), old));
    }
}
