#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace decodefleet {

namespace {

bool penalises(const df_draw& draw) { return draw.repetition != 1 || draw.presence != 0 || draw.frequency != 0; }

int padded(int size) { return (size + SCAN - 1) / SCAN * SCAN; }

// The first whose running sum is beyond `target`; the last that has any weight where rounding leaves none.
template <class Weight>
int first_beyond(int count, double target, Weight weight) {
    double sum = 0;
    int last = 0;
    for (int i = 0; i < count; i++) {
        double one = weight(i);
        if (one > 0) last = i;
        sum += one;
        if (sum > target) return i;
    }
    return last;
}

}  // namespace

double uniform(uint64_t seed, uint64_t sample, uint64_t position) {
    uint64_t counter[4] = {position + 1, 0, 0, 0}, key[2] = {seed, sample};  // numpy counts before it draws
    if (!counter[0]) counter[1] = 1;
    for (int round = 0; round < 10; round++) {
        unsigned __int128 first = static_cast<unsigned __int128>(0xD2E7470EE14C6C93) * counter[0];
        unsigned __int128 second = static_cast<unsigned __int128>(0xCA5A826395121157) * counter[2];
        uint64_t next[4] = {static_cast<uint64_t>(second >> 64) ^ counter[1] ^ key[0], static_cast<uint64_t>(second),
                            static_cast<uint64_t>(first >> 64) ^ counter[3] ^ key[1], static_cast<uint64_t>(first)};
        std::copy(next, next + 4, counter);
        key[0] += 0x9E3779B97F4A7C15;
        key[1] += 0xBB67AE8584CAA73B;
    }
    return static_cast<double>(counter[0] >> 11) * 0x1p-53;
}

int Sampler::choose(const float* logits, int size, const df_draw* draw) {
    const int room = padded(size), blocks = room / SCAN;
    if (scanned_.size() < static_cast<size_t>(blocks)) {
        scanned_.resize(blocks);
        tops_.resize(blocks);
        sums_.resize(blocks);
        z_.resize(room);
        weights_.resize(room);
        counts_.resize(room);
    }
    if (!kernels_.scan(logits, size, scanned_.data())) return -1;
    if (!draw || (draw->temperature == 0 && !penalises(*draw))) {
        auto block = std::max_element(scanned_.begin(), scanned_.begin() + blocks);  // the first of equals
        const float* begin = logits + (block - scanned_.begin()) * SCAN;
        return static_cast<int>(std::find(begin, logits + size, *block) - logits);
    }
    kernels_.widen(logits, size, z_.data());
    penalise(*draw);
    if (draw->temperature == 0) return static_cast<int>(std::max_element(z_.begin(), z_.begin() + size) - z_.begin());
    kernels_.temper(z_.data(), room, draw->temperature, tops_.data());
    const double top = *std::max_element(tops_.begin(), tops_.begin() + blocks);
    return draw->top_k || draw->top_p < 1 ? drawn_from_likeliest(*draw, size, top) : drawn_in_order(*draw, size, top);
}

void Sampler::penalise(const df_draw& draw) {
    if (!penalises(draw)) return;
    if (draw.repetition != 1) {
        for (int i = 0; i < draw.tokens; i++) {
            if (counts_[draw.token_ids[i]]++) continue;
            double& z = z_[draw.token_ids[i]];
            z = z > 0 ? z / draw.repetition : z * draw.repetition;
        }
        for (int i = 0; i < draw.tokens; i++) counts_[draw.token_ids[i]] = 0;
    }
    for (int i = draw.prompt_tokens; i < draw.tokens; i++) counts_[draw.token_ids[i]]++;
    for (int i = draw.prompt_tokens; i < draw.tokens; i++) {
        int32_t& count = counts_[draw.token_ids[i]];
        if (count) z_[draw.token_ids[i]] -= draw.presence + draw.frequency * count;
        count = 0;
    }
}

// Without top-k and top-p: every token of enough weight, by id.
int Sampler::drawn_in_order(const df_draw& draw, int size, double top) {
    const int blocks = padded(size) / SCAN;
    double total = 0;
    for (int block = 0; block < blocks; block++) {
        double* weights = &weights_[block * SCAN];
        if (draw.min_p > 0 && tops_[block] < top + std::log(draw.min_p) - 1e-6) {
            sums_[block] = 0;
            continue;
        }
        sums_[block] = kernels_.weigh(&z_[block * SCAN], top, weights);
        if (draw.min_p > 0) {
            sums_[block] = 0;
            for (int i = 0; i < SCAN; i++) {
                if (weights[i] < draw.min_p) weights[i] = 0;
                sums_[block] += weights[i];
            }
        }
        total += sums_[block];
    }
    double target = uniform(draw.seed, draw.sample, draw.position) * total;
    int block = first_beyond(blocks, target, [&](int i) { return sums_[i]; });
    for (int i = 0; i < block; i++) target -= sums_[i];
    int first = block * SCAN;
    return first + first_beyond(std::min(SCAN, size - first), target, [&](int i) { return weights_[first + i]; });
}

// Candidates whose z is at least `least`.
void Sampler::gather(double least, int size) {
    candidates_.clear();
    for (int first = 0; first < size; first += SCAN) {
        if (tops_[first / SCAN] < least) continue;
        for (int i = first; i < std::min(first + SCAN, size); i++) {
            if (z_[i] >= least) candidates_.push_back({z_[i], i});
        }
    }
}

// With top-k or top-p: only as many of the likeliest are sorted as those two can keep.
int Sampler::drawn_from_likeliest(const df_draw& draw, int size, double top) {
    const int keep = draw.top_k ? std::min(draw.top_k, size) : size;
    double total = 0;  // of all that top-k keeps
    if (keep == size) {
        for (int first = 0; first < size; first += SCAN) total += kernels_.weigh(&z_[first], top, &weights_[first]);
    }
    for (double gap = 4;; gap *= 1.25) {
        gather(gap > 700 ? -std::numeric_limits<double>::infinity() : top - gap, size);
        if (candidates_.size() >= static_cast<size_t>(keep) || gap > 700) break;
        if (keep < size || draw.top_p >= 1) continue;
        double sum = 0;
        for (const Candidate& one : candidates_) sum += weights_[one.token];
        if (sum >= draw.top_p * total * (1 + 1e-12)) break;
    }
    auto likelier = [](const Candidate& a, const Candidate& b) { return a.z != b.z ? a.z > b.z : a.token < b.token; };
    int count = std::min(static_cast<int>(candidates_.size()), keep);
    if (count < static_cast<int>(candidates_.size())) {
        std::nth_element(candidates_.begin(), candidates_.begin() + count, candidates_.end(), likelier);
    }
    std::sort(candidates_.begin(), candidates_.begin() + count, likelier);
    const int room = padded(count);
    if (weights_.size() < static_cast<size_t>(room)) weights_.resize(room);
    double kept = 0;
    for (int first = 0; first < count; first += SCAN) {
        double z[SCAN];
        for (int i = 0; i < SCAN; i++) z[i] = first + i < count ? candidates_[first + i].z : -std::numeric_limits<double>::infinity();
        kernels_.weigh(z, top, &weights_[first]);
        for (int i = first; i < std::min(first + SCAN, count); i++) kept += weights_[i];
    }
    if (draw.top_p < 1) {
        const double target = draw.top_p * (keep < size ? kept : total);
        double sum = 0;
        for (int i = 0; i < count; i++) {
            sum += weights_[i];
            if (sum >= target) count = i + 1;
        }
    }
    while (draw.min_p > 0 && count > 1 && weights_[count - 1] < draw.min_p) count--;
    kept = 0;
    for (int i = 0; i < count; i++) kept += weights_[i];
    const double target = uniform(draw.seed, draw.sample, draw.position) * kept;
    return candidates_[first_beyond(count, target, [&](int i) { return weights_[i]; })].token;
}

}  // namespace decodefleet
