// Which tier this processor runs.
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace decodefleet {

namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

[[maybe_unused]] bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

// The system gives a process its tiles on request, and may refuse.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                                syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted && has_avx512();
#else
    return false;
#endif
}
#endif

bool runs_always() { return true; }

// The best first.
const struct {
    const Kernels& kernels;
    bool (*runs)();
} TIERS[] = {
#if defined(__x86_64__)
#if !defined(DECODEFLEET_WITHOUT_AMX)
    {amx_kernels, has_amx},
#endif
#if !defined(DECODEFLEET_WITHOUT_AVX512)
    {avx512_kernels, has_avx512},
#endif
    {avx2_kernels, has_avx2},
#endif
    {portable_kernels, runs_always},
};

}  // namespace

const Kernels* find_kernels(const char* name) {
    for (const auto& tier : TIERS) {
        if ((!name || !std::strcmp(name, tier.kernels.name)) && tier.runs()) return &tier.kernels;
    }
    return nullptr;
}

}  // namespace decodefleet
