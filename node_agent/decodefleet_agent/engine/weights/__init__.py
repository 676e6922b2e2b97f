"""A model's weights in one form, whatever file they come from."""

from __future__ import annotations

from pathlib import Path

from decodefleet_agent.engine.weights.model import Blocks, ModelConfig, Weights
from decodefleet_agent.model_files import ModelError

__all__ = ["Blocks", "ModelConfig", "Weights", "load"]


def load(path: Path) -> Weights:
    """Opens a GGUF file, or a directory with config.json and safetensors files. Tensors are read when asked for. Raises ModelError."""
    from decodefleet_agent.engine.weights import gguf_weights, safetensors_weights

    if path.is_dir():
        if (path / "config.json").is_file():
            return safetensors_weights.load(path)
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelError(f"{path} holds neither config.json nor exactly one .gguf file ({len(files)} found); name the file itself")
        path = files[0]
    if not path.is_file():
        raise ModelError(f"there is no model at {path}; correct model.uri")
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path.name} is not a model that can be loaded; give a .gguf file, or a directory with config.json and safetensors files"
        )
    return gguf_weights.load(path)
