// From a row of logits to a token, with the meaning of engine/sampling.py.
#pragma once

#include <vector>

#include "kernels.h"

namespace decodefleet {

class Sampler {
  public:
    explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

    // The token that `draw` takes, the likeliest one for null; -1 where a logit is not finite.
    int choose(const float* logits, int size, const df_draw* draw);

  private:
    struct Candidate {
        double z;
        int token;
    };

    void penalise(const df_draw& draw);
    int drawn_in_order(const df_draw& draw, int size, double top);
    int drawn_from_likeliest(const df_draw& draw, int size, double top);
    void gather(double least, int size);

    const Kernels& kernels_;
    std::vector<float> scanned_;  // the largest of each 64 logits
    std::vector<double> z_, tops_, weights_, sums_;
    std::vector<int32_t> counts_;  // [vocabulary] zero between rows
    std::vector<Candidate> candidates_;
};

// In [0, 1): Philox4x64-10 of key (seed, sample) and counter (position, 0, 0, 0), as numpy's generator has it.
double uniform(uint64_t seed, uint64_t sample, uint64_t position);

}  // namespace decodefleet
