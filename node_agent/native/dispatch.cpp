// Which tier this processor runs.
#include <cstring>

#include "kernels.h"

namespace decodefleet {

const Kernels* find_kernels(const char* name) {
#if defined(__x86_64__)
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && (!name || !std::strcmp(name, avx2_kernels.name))) return &avx2_kernels;
#endif
    return !name || !std::strcmp(name, portable_kernels.name) ? &portable_kernels : nullptr;
}

}  // namespace decodefleet
