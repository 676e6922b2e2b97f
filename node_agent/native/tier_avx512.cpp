// AVX512 with VNNI.
#if defined(__x86_64__)

#include "simd_avx512.h"

#include "kernels.inl"

namespace decodefleet {
extern const Kernels avx512_kernels;
const Kernels avx512_kernels = DECODEFLEET_KERNELS("avx512");
}  // namespace decodefleet

#endif
