"""A GGUF model in another number format, made once by llama.cpp and kept beside the user's other caches."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

_TYPES = {"Q4_0": 2, "Q8_0": 7}  # llama_ftype


REQUANTIZED = "re-quantised"


def gguf_in(path: Path, form: str) -> tuple[Path, str, str]:
    """The file to load, its format's name, and what to say of it.

    Other formats than the file's own are re-quantised from it: Q8_0 loses next to nothing, Q4_0 some.
    """
    if form not in _TYPES:
        return path, path.stem.rpartition(".")[2], "as shipped"
    state = path.stat()
    digest = hashlib.sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    result = cache() / f"{path.stem}-{digest}.{form}.gguf"
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        part = result.with_suffix(f".{os.getpid()}.part")
        # In a process of its own: what quantising needs must not count as the engine's memory.
        subprocess.run([sys.executable, __file__, str(path), str(part), form], check=True)
        part.rename(result)
    return result, form, REQUANTIZED


def cache() -> Path:
    """Where models in other formats are kept; remove it freely."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "decodefleet" / "bench"


def _quantise(source: str, target: str, form: str) -> None:
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize, settings.nthread = _TYPES[form], True, len(os.sched_getaffinity(0))
    if status := llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings):
        raise SystemExit(f"llama.cpp cannot quantise {source} to {form}: {status}")


if __name__ == "__main__":
    _quantise(*sys.argv[1:])
