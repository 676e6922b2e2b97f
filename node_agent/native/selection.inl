// What a box of keys is worth to a query. Included by kernels.inl.

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
