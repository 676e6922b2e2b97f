// Attention of some query heads to one partition of one head's keys and values. Included by kernels.inl.
//
// With int8 keys and values both products are of whole numbers, so that their order, and with it who computes them how, is free: the softmax
// weights of a partition, times the values' scales, become whole numbers up to LARGEST_WEIGHT, kept in whichever form a tier multiplies.
// With fp32 and fp8 both are in fp32, of the numbers as they are stored: scales multiply what is between the products.

constexpr float NOTHING = -__builtin_inff();

// 2 to the power of x, which is at most 0; below -126 as if -126. Relative error below 4e-7; 1 for 0.
inline F16 power(F16 x) {
    x = max(x, all(-126.0f));
    F16 n = round(x), r = x - n;
    // Least relative error on -0.5 … 0.5.
    constexpr float COEFFICIENTS[] = {0.00967151299f, 0.0555073358f, 0.240222424f, 0.693147004f, 1.0f};
    F16 p = all(0.00132647273f);
    for (float c : COEFFICIENTS) p = fma(p, r, all(c));
    return p * power_of_two(n);
}

inline float power(float x) {
    float lanes[16];
    store(lanes, power(all(x)));
    return lanes[0];
}

// Nothing in place of the scores of tokens that a query does not see.
inline void hide(float* scores, int from, int to) {
    for (int t = from / 16 * 16; t < to; t += 16) {
        F16 seen = load(scores + t);
        store(scores + t, first(to - t, first(from - t, seen, all(NOTHING)), seen));
    }
}

// `tokens` scores become softmax weights in place, with zeros up to a multiple of 16; `result` gets the largest score and the weights' sum.
inline void weigh(float* scores, int tokens, Partial& result) {
    const int whole = tokens / 16 * 16;
    F16 top = all(NOTHING), total = all(0.0f), rest = top;
    for (int t = 0; t < whole; t += 16) top = max(top, load(scores + t));
    if (whole < tokens) {
        rest = first(tokens - whole, load(scores + whole), rest);
        top = max(top, rest);
    }
    result.top = largest(top);
    top = all(result.top);
    for (int t = 0; t < whole; t += 16) {
        F16 weight = power(load(scores + t) - top);
        total = total + weight;
        store(scores + t, weight);
    }
    if (whole < tokens) {
        F16 weight = first(tokens - whole, power(rest - top), all(0.0f));
        total = total + weight;
        store(scores + whole, weight);
    }
    result.sum = sum(total);
}

// Weights become these times the values' scales; returns the largest of every sixteenth.
template <int FORMAT>
inline F16 scale_weights(float* weights, int tokens, const PageView* pages) {
    F16 top = all(0.0f);
    for (int t = 0; t < tokens; t += 16) {
        F16 scale = load(pages[t / PAGE].value_scales);
        if (tokens - t < 16) scale = first(tokens - t, scale, all(0.0f));  // what another sequence left there may be anything
        if (FORMAT == DF_KV_FP8) scale = scale * all(FP8_UNIT);
        F16 scaled = load(weights + t) * scale;
        store(weights + t, scaled);
        top = max(top, scaled);
    }
    return top;
}

// Weights times the values' scales as whole numbers, up to a multiple of 16 tokens; returns the scale of these.
inline float round_weights(float* weights, int tokens, const PageView* pages, uint8_t* rounded) {
    const float most = largest(scale_weights<DF_KV_INT8>(weights, tokens, pages));
    const F16 inverse = all(most > 0 ? LARGEST_WEIGHT / most : 0.0f);
    for (int t = 0; t < tokens; t += 16) {
        store_weights(rounded, t, round(min(max(load(weights + t) * inverse, all(0.0f)), all(LARGEST_WEIGHT))));
    }
    return most / LARGEST_WEIGHT;
}

inline int most_tokens(const AttentionPart& part, int first, int count) {
    int tokens = 0;
    for (int r = first; r < first + count; r++) tokens = tokens < part.tokens[r] ? part.tokens[r] : tokens;
    return tokens;
}

// The page that is fetched from memory while `page` is read, line by line, so that loads need not wait for it: of the next partition, once.
inline const PageView& fetched(const AttentionPart& part, int at, int page) { return !at && page < part.next_count ? part.next[page] : part.pages[page]; }

// From here on, R queries from number `at` on.
template <int R>
void score_int8(const AttentionPart& part, int at, int tokens) {
    const int8_t* queries[R];
    int32_t sums[R];
    for (int r = 0; r < R; r++) {
        queries[r] = part.int8_queries[at + r];
        sums[r] = sum_int8(queries[r], part.dim);
    }
    for (int t = 0; t < tokens; t += PAGE) {
        const PageView &page = part.pages[t / PAGE], &next = fetched(part, at, t / PAGE);
        for (int i = 0; i < 2; i++) __builtin_prefetch(next.key_scales + 16 * i);
        I16 dot[R];
        dot_bytes<R>(reinterpret_cast<const int8_t*>(page.keys), 4 * PAGE, part.dim / 4, queries, sums, next.keys, dot);
        F16 scale = load(page.key_scales);
        for (int r = 0; r < R; r++) store(part.scratch->scores + r * PARTITION + t, to_float(dot[r]) * (scale * all(part.scales[at + r])));
    }
}

// From the i-th number on.
template <int FORMAT>
inline F16 load_numbers(const uint8_t* numbers, int i) {
    if constexpr (FORMAT == DF_KV_FP8) return load_fp8(numbers + i);
    return load(reinterpret_cast<const float*>(numbers) + i);
}

template <int R, int FORMAT>
void score_floats(const AttentionPart& part, int at, int tokens) {
    for (int t = 0; t < tokens; t += PAGE) {
        const PageView &page = part.pages[t / PAGE], &next = fetched(part, at, t / PAGE);
        for (int i = 0; i < 2 && FORMAT == DF_KV_FP8; i++) __builtin_prefetch(next.key_scales + 16 * i);
        F16 dot[R];
        repeat<R>([&](auto r) { dot[r] = all(0.0f); });
        for (int d = 0; d < part.dim; d += 4) {
            if (FORMAT == DF_KV_FP8) __builtin_prefetch(next.keys + d * PAGE);
            repeat<4>([&](auto i) {
                F16 key = load_numbers<FORMAT>(page.keys, (d + i) * PAGE);
                repeat<R>([&](auto r) { dot[r] = fma(all(part.queries[at + r][d + i]), key, dot[r]); });
            });
        }
        if constexpr (FORMAT == DF_KV_FP8) {
            F16 scale = load(page.key_scales) * all(FP8_UNIT);
            repeat<R>([&](auto r) { dot[r] = dot[r] * scale; });
        }
        repeat<R>([&](auto r) { store(part.scratch->scores + r * PARTITION + t, dot[r]); });
    }
}

template <int R>
void mix_int8(const AttentionPart& part, int at, int tokens, const float (&factors)[R]) {
    for (int d = 0; d < part.dim; d += 16 * MIXED_TOGETHER) {
        Mix sums[R * MIXED_TOGETHER];
        repeat<R * MIXED_TOGETHER>([&](auto i) { sums[i] = no_mix(); });
        for (int from = 0; from < tokens; from += PAGE) {
            const int8_t* values = reinterpret_cast<const int8_t*>(part.pages[from / PAGE].values) + 4 * d;
            const int to = tokens < from + PAGE ? tokens : from + PAGE;
            const uint8_t* next = fetched(part, at, from / PAGE).values + d * PAGE;
            for (int t = from; t < to; t += 4, values += 4 * part.dim, next += 64 * MIXED_TOGETHER) {
                repeat<MIXED_TOGETHER>([&](auto i) { __builtin_prefetch(next + 64 * i); });
                repeat<R * MIXED_TOGETHER>([&](auto i) {
                    const uint8_t* weights = part.scratch->weights + 2 * PARTITION * (i / MIXED_TOGETHER);
                    sums[i] = add_products(sums[i], weights, t, values + 64 * (i % MIXED_TOGETHER));
                });
            }
        }
        repeat<R * MIXED_TOGETHER>([&](auto i) {
            constexpr int r = i / MIXED_TOGETHER;
            store(part.result[at + r].values + d + 16 * (i % MIXED_TOGETHER), to_float(total(sums[i])) * all(factors[r]));
        });
    }
}

template <int R, int FORMAT>
void mix_floats(const AttentionPart& part, int at, int tokens) {
    for (int d = 0; d < part.dim; d += 16 * MIXED_TOGETHER) {
        F16 acc[R * MIXED_TOGETHER];
        repeat<R * MIXED_TOGETHER>([&](auto i) { acc[i] = all(0.0f); });
        for (int t = 0; t < tokens; t++) {
            const uint8_t* values = part.pages[t / PAGE].values;
            if (FORMAT == DF_KV_FP8 && t % 4 == 0) {
                const uint8_t* next = fetched(part, at, t / PAGE).values + (d + t % PAGE * MIXED_TOGETHER) * PAGE;
                repeat<MIXED_TOGETHER>([&](auto i) { __builtin_prefetch(next + 64 * i); });
            }
            repeat<MIXED_TOGETHER>([&](auto i) {
                F16 value = load_numbers<FORMAT>(values, t % PAGE * part.dim + d + 16 * i);
                repeat<R>([&](auto r) {
                    constexpr int j = r * MIXED_TOGETHER + i;
                    acc[j] = fma(all(part.scratch->scores[r * PARTITION + t]), value, acc[j]);
                });
            });
        }
        repeat<R * MIXED_TOGETHER>([&](auto i) { store(part.result[at + i / MIXED_TOGETHER].values + d + 16 * (i % MIXED_TOGETHER), acc[i]); });
    }
}

// A query beside one that sees more tokens has weights of zero for those, which change nothing.
template <int R, int FORMAT>
void attend(AttentionPart& part, int at) {
    constexpr bool INT8 = FORMAT == DF_KV_INT8;
    const int tokens = most_tokens(part, at, R);
    if constexpr (INT8) {
        score_int8<R>(part, at, tokens);
    } else {
        score_floats<R, FORMAT>(part, at, tokens);
    }
    float factors[R];
    for (int r = 0; r < R; r++) {
        float* scores = part.scratch->scores + r * PARTITION;
        uint8_t* weights = part.scratch->weights + 2 * PARTITION * r;
        const int own = part.tokens[at + r];
        hide(scores, part.hidden_from[at + r], part.hidden_to[at + r]);
        weigh(scores, own, part.result[at + r]);
        if (INT8) factors[r] = round_weights(scores, own, part.pages, weights);
        if (FORMAT == DF_KV_FP8) scale_weights<FORMAT>(scores, own, part.pages);
        for (int t = (own + 15) / 16 * 16; t < tokens; t += 16) {
            INT8 ? store_weights(weights, t, all(0.0f)) : store(scores + t, all(0.0f));
        }
    }
    if constexpr (INT8) {
        mix_int8<R>(part, at, tokens, factors);
    } else {
        mix_floats<R, FORMAT>(part, at, tokens);
    }
}

template <int FORMAT>
void attend_some(AttentionPart& part, int from) {
    for (int at = from, left; (left = part.count - at) > 0; at += 3) {
        left >= 3 ? attend<3, FORMAT>(part, at) : left == 2 ? attend<2, FORMAT>(part, at) : attend<1, FORMAT>(part, at);
    }
}

void attend_int8(AttentionPart& part) { attend_some<DF_KV_INT8>(part, 0); }

void attend_fp32(AttentionPart& part) { attend_some<DF_KV_FP32>(part, 0); }

void attend_fp8(AttentionPart& part) { attend_some<DF_KV_FP8>(part, 0); }

void combine(Partial& all_before, const Partial& next, int dim) {
    float top = all_before.top > next.top ? all_before.top : next.top;
    float before = power(all_before.top - top), after = power(next.top - top);
    all_before.top = top;
    all_before.sum = all_before.sum * before + next.sum * after;
    for (int d = 0; d < dim; d += 16) {
        F16 old = load(all_before.values + d) * all(before);
        store(all_before.values + d, fma(load(next.values + d), all(after), old));
    }
}
