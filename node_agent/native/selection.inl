// What summaries of keys are worth to a query. Included by kernels.inl.

// `query`: [2 * dim], for the high values, then for the low ones; `box`: [dim], a high value in the low bits of each byte.
// Whole numbers, so that the order of additions is free.
int32_t score_summary(const int16_t* query, const uint8_t* box, int dim) {
    int32_t score = 0;
    for (int d = 0; d < dim; d++) {
        const int16_t high = static_cast<int16_t>((box[d] & 15) - 8), low = static_cast<int16_t>((box[d] >> 4) - 8);
        score += query[d] * high + query[dim + d] * low;
    }
    return score;
}

// Sketches: [dim / 16][16 keys] signs of eight dimensions, [16] sizes, a scale. `sums`: [dim / 8][16], of four values of a query with the signs
// that four bits say. A score is the largest of a page's keys.
void score_sketches(const int8_t* sums, const uint8_t* const* sketches, int count, int dim, float scale, float* scores) {
    for (int i = 0; i < count; i++) {
        float page_scale;
        __builtin_memcpy(&page_scale, sketches[i] + dim + PAGE, 4);
        const F16 products = to_float(sum_signs(sums, sketches[i], dim / 16)) * load_bytes(sketches[i] + dim);
        scores[i] = largest(products) * (page_scale * scale);
    }
}

// `size`: a multiple of 16. Scores are of a softmax of powers of two.
void add_softmax(float* scores, int size, float* total) {
    F16 top = all(NOTHING), mass = all(0.0f);
    for (int i = 0; i < size; i += 16) top = max(top, load(scores + i));
    top = all(largest(top));
    for (int i = 0; i < size; i += 16) {
        const F16 weight = power(load(scores + i) - top);
        mass = mass + weight;
        store(scores + i, weight);
    }
    mass = all(1.0f / sum(mass));
    for (int i = 0; i < size; i += 16) store(total + i, fma(load(scores + i), mass, load(total + i)));
}
