// AVX512 with VNNI, and AMX for many rows.
#if defined(__x86_64__)

#include "simd_avx512.h"

#include "kernels.inl"

#include "amx.inl"
#include "amx_attention.inl"

namespace decodefleet {
extern const Kernels amx_kernels;
const Kernels amx_kernels = {"amx", enter, leave, amx_linear, amx_attend_int8, DECODEFLEET_SHARED_KERNELS};
}  // namespace decodefleet

#endif
