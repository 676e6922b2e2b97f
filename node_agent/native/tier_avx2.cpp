// AVX2, FMA and F16C.
#if defined(__x86_64__)

#include "simd_avx2.h"

#include "kernels.inl"

namespace decodefleet {
extern const Kernels avx2_kernels;
const Kernels avx2_kernels = DECODEFLEET_KERNELS("avx2");
}  // namespace decodefleet

#endif
