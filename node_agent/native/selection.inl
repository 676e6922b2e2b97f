// The score of a summary for the query heads that share its keys. Included by kernels.inl.

// `queries`: [heads, size], `ends`: [size]. Whole numbers until the scales, so that the order of additions is free.
float score_summary(const int8_t* queries, const float* scales, int heads, const int8_t* ends, int size) {
    float score = 0;
    for (int head = 0; head < heads; head++) {
        int32_t dot = 0;
        for (int i = 0; i < size; i++) dot += static_cast<int16_t>(queries[head * size + i]) * static_cast<int16_t>(ends[i]);
        score += scales[head] * static_cast<float>(dot);
    }
    return score;
}
