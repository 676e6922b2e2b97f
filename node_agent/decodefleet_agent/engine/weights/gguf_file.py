"""Reads the header of a GGUF file and maps its tensors, without walking token lists in Python objects."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decodefleet_agent.model_files import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # rows first, as PyTorch has it
    type: int  # gguf.GGMLQuantizationType
    data: np.ndarray  # the stored bytes, uint8, mapped


@dataclass(frozen=True)
class GGUFFile:
    """Key-value metadata and mapped tensors of one GGUF file (versions 2 and 3, little-endian)."""

    path: Path
    fields: dict[str, object]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def scalar(self, code: str) -> int | float:
        fmt = struct.Struct("<" + code)
        self._need(fmt.size)
        (value,) = fmt.unpack_from(self.data, self.position)
        self.position += fmt.size
        return value

    def integer(self, code: str) -> int:
        return int(self.scalar(code))

    def string(self) -> str:
        length = self.integer("Q")
        self._need(length)
        start, self.position = self.position, self.position + length
        return self.data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.integer("I"), self.integer("Q")
            if element in _SCALARS:
                dtype = np.dtype(
                    "<"
                    + {
                        "B": "u1",
                        "b": "i1",
                        "H": "u2",
                        "h": "i2",
                        "I": "u4",
                        "i": "i4",
                        "f": "f4",
                        "?": "u1",
                        "Q": "u8",
                        "q": "i8",
                        "d": "f8",
                    }[_SCALARS[element]]
                )
                self._need(count * dtype.itemsize)
                start, self.position = self.position, self.position + count * dtype.itemsize
                return np.frombuffer(self.data[start : self.position], dtype).tolist()
            self._need(count)
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is not a readable GGUF file (value type {kind}); download it again")
        return self.scalar(_SCALARS[kind])

    def _need(self, size: int) -> None:
        if self.position + size > len(self.data):
            raise ModelError(f"{self.path} is truncated: its header goes on after the file's {len(self.data)} bytes; download it again")


def read_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file. The tokens' lists are fields too ("tokenizer.ggml.tokens"). Raises ModelError."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise ModelError(f"{path} is no GGUF file: it has only {path.stat().st_size} bytes; download it again")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(mapped, path)
    magic, version = mapped[:4], struct.unpack_from("<I", mapped, 4)[0]
    if magic != b"GGUF" or version not in (2, 3):
        raise ModelError(f"{path} is no GGUF file of version 2 or 3 (it begins with {magic!r}, version {version}); give another file")
    cursor.position = 8
    tensor_count, field_count = cursor.integer("Q"), cursor.integer("Q")
    fields = {}
    for _ in range(field_count):
        key = cursor.string()
        fields[key] = cursor.value(cursor.integer("I"))
    infos = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(cursor.integer("Q") for _ in range(cursor.integer("I")))[::-1]
        infos.append((name, shape, cursor.integer("I"), cursor.integer("Q")))
    alignment = int(fields.get("general.alignment", 32))  # type: ignore[call-overload]
    base = -(-cursor.position // alignment) * alignment
    whole = np.frombuffer(mapped, np.uint8)
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in set(GGMLQuantizationType):
            raise ModelError(f"{path}: tensor {name} has the unknown type {kind}; convert the model to Q8_0, Q4_1, Q4_0 or F16")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        length = int(np.prod(shape, dtype=np.int64)) // block * size
        start = base + offset
        if start + length > whole.size:
            raise ModelError(
                f"{path} is truncated: tensor {name} ends at byte {start + length}, and the file has {whole.size}; download it again"
            )
        tensors[name] = GGUFTensor(name, shape, kind, whole[start : start + length])
    return GGUFFile(path, fields, tensors)
