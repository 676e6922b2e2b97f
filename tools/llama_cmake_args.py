"""Prints CMAKE_ARGS that build llama.cpp for this machine's instruction sets, by name: its own detection can pick illegal ones."""

from __future__ import annotations

from pathlib import Path

# llama.cpp's option: the flags of /proc/cpuinfo that it needs.
OPTIONS = {
    "AVX": {"avx"},
    "AVX2": {"avx2"},
    "FMA": {"fma"},
    "F16C": {"f16c"},
    "BMI2": {"bmi2"},
    "AVX512": {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"},
    "AVX512_VNNI": {"avx512_vnni"},
    "AVX512_BF16": {"avx512_bf16"},
    "AVX_VNNI": {"avx_vnni"},
}
LEFT_OUT = ("LLAVA_BUILD", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER", "LLAMA_CURL")


def cmake_args(cpuinfo: str) -> str:
    """The arguments for a machine with this /proc/cpuinfo."""
    flags = next((set(line.partition(":")[2].split()) for line in cpuinfo.splitlines() if line.startswith("flags")), set())
    chosen = [f"-DGGML_{option}={'ON' if needs <= flags else 'OFF'}" for option, needs in OPTIONS.items()] if flags else []
    return " ".join(["-DGGML_NATIVE=OFF", *chosen, *(f"-D{option}=OFF" for option in LEFT_OUT)])


if __name__ == "__main__":
    print(cmake_args(Path("/proc/cpuinfo").read_text()))
