// Any processor.
#include "simd_portable.h"

#include "kernels.inl"

namespace decodefleet {
extern const Kernels portable_kernels;
const Kernels portable_kernels = DECODEFLEET_KERNELS("portable");
}  // namespace decodefleet
