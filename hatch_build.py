"""Compiles the native backend into the agent's package; without a C++ compiler the package is pure Python, and the reference serves.

`python hatch_build.py [sanitize]` does it outside of a build.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOURCES = Path("node_agent/native")
LIBRARY = Path("node_agent/decodefleet_agent/engine/backends/libdecodefleet.so")
FLAGS = ["-std=c++17", "-O3", "-g1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
# Each tier may use its own instructions; whether the processor has them is asked when the program runs.
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
TIER_FLAGS = {"tier_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"], "tier_avx512.cpp": _AVX512, "tier_amx.cpp": _AVX512}
# What a compiler and its assembler must take for a tier to be built.
TIER_PROBES = {"tier_avx512.cpp": '__asm__("vpdpbusd %zmm0, %zmm0, %zmm0");', "tier_amx.cpp": '__asm__("tdpbssd %tmm2, %tmm1, %tmm0");'}
SANITIZERS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]


def compiler() -> list[str] | None:
    """The C++ compiler's command: $CXX, or the first that is installed."""
    if command := shlex.split(os.environ.get("CXX", "")):
        return command if shutil.which(command[0]) else None
    return next(([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def build(root: Path, sanitize: bool = False) -> str | None:
    """Compiles and links the library. Returns why there is none, or None."""
    command = compiler()
    if command is None:
        return "there is no C++ compiler (c++, g++ or clang++)"
    common = FLAGS + (SANITIZERS if sanitize else [])
    tiers = TIER_FLAGS if platform.machine().lower() in ("x86_64", "amd64") else {}
    with tempfile.TemporaryDirectory() as scratch:

        def run(arguments: list[str]) -> str:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True)
            return done.stderr or f"exit status {done.returncode}" if done.returncode else ""

        def compiled(source: Path) -> str:
            return run([*common, *absent, *tiers.get(source.name, []), "-c", str(source), "-o", str(Path(scratch, source.stem + ".o"))])

        def can_build(tier: str) -> bool:
            probe = Path(scratch, "probe.cpp")
            probe.write_text(TIER_PROBES[tier])
            return not run([*tiers[tier], "-c", str(probe), "-o", str(probe.with_suffix(".o"))])

        unsupported = {tier for tier in TIER_PROBES if tier in tiers and not can_build(tier)}
        absent = [f"-DDECODEFLEET_WITHOUT_{Path(tier).stem.removeprefix('tier_').upper()}" for tier in sorted(unsupported)]
        sources = sorted(source for source in (root / SOURCES).glob("*.cpp") if source.name not in unsupported)
        with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:
            errors = [error for error in pool.map(compiled, sources) if error]
        if not errors:
            # Replaced as a whole: a process that has the old one mapped keeps it.
            linked = Path(scratch, "libdecodefleet.so")
            runtime = [] if sanitize or sys.platform == "darwin" else ["-static-libstdc++", "-static-libgcc"]
            objects = [str(Path(scratch, source.stem + ".o")) for source in sources]
            if not (error := run([*common, *runtime, "-shared", *objects, "-o", str(linked)])):
                target = root / LIBRARY
                shutil.copy2(linked, target.with_suffix(".new"))
                target.with_suffix(".new").replace(target)
                return None
            errors = [error]
    return f"{shlex.join(command)} failed:\n" + "\n".join(errors)


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object


class NativeBuildHook(BuildHookInterface):
    """Of the wheel, editable or not."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if problem := build(Path(self.root)):
            self.app.display_warning(f"the native backend is left out: {problem}")
            return
        build_data["artifacts"].append(LIBRARY.as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    sys.exit(build(Path(__file__).resolve().parent, sanitize="sanitize" in sys.argv[1:]))
