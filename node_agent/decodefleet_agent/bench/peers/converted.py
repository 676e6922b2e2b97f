"""A GGUF model in the form that a peer reads: another number format, or a directory. Made once, and kept with the user's other caches."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodefleet_agent.bench.protocol import Load

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

REQUANTIZED = "re-quantised"
_TYPES = {"Q4_0": 2, "Q8_0": 7}  # llama_ftype
_DIRECTORY = "directory"


def gguf_in(load: Load) -> tuple[Path, str, str]:
    """The file to load, its format's name, and what to say of it.

    Other formats than the file's own are re-quantised from it: Q8_0 loses next to nothing, Q4_0 some.
    """
    if load.format not in _TYPES:
        return Path(load.path), load.shipped, "as shipped"
    return _converted(Path(load.path), load.format), load.format, REQUANTIZED


def directory_of(path: Path) -> Path:
    """A directory in Hugging Face's layout with the same weights, in fp32."""
    return path if path.is_dir() else _converted(path, _DIRECTORY)


def cache() -> Path:
    """Where converted models are kept; remove it freely."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "decodefleet" / "bench"


def _converted(path: Path, what: str) -> Path:
    state = path.stat()
    digest = hashlib.sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    result = cache() / (f"{path.stem}-{digest}" + ("" if what == _DIRECTORY else f".{what}.gguf"))
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        part = result.with_name(f"{result.name}.{os.getpid()}.part")
        # In a process of its own: what converting needs must not count as the engine's memory.
        done = subprocess.run([sys.executable, __file__, str(path), str(part), what], capture_output=True, text=True)
        if done.returncode:
            _remove(part)
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise RuntimeError(f"{path.name} could not be converted to {what}: {reason}")
        part.rename(result)
    return result


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)


def _quantise(source: str, target: str, form: str) -> None:
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize, settings.nthread = _TYPES[form], True, len(os.sched_getaffinity(0))
    if status := llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings):
        raise SystemExit(f"llama.cpp failed with {status}")


def unpacked(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of transformers with dense weights; newer versions would leave those of a GGUF file in blocks where they find kernels."""
    import transformers

    options: dict[str, Any] = {}
    if not path.is_dir():
        options["gguf_file"] = path.name
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder = path if path.is_dir() else path.parent
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def _unpack(source: Path, target: str) -> None:
    import torch

    model = unpacked(source, torch.float32)
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)  # with it a model counts as quantised, and is not saved
    model.save_pretrained(target)


if __name__ == "__main__":
    if sys.argv[3] == _DIRECTORY:
        _unpack(Path(sys.argv[1]), sys.argv[2])
    else:
        _quantise(*sys.argv[1:])
