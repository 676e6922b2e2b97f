"""The metadata of a GGUF file, without its tensors: read in a tenth of a second, where the gguf package takes several."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from decodefleet_agent.text.errors import TextError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    def take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise TextError(f"{self._path} ends in the middle of its metadata; it was probably not downloaded whole")
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                size = struct.calcsize("<" + _SCALARS[item])
                return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.take(size * count)))
            return [self.value(item) for _ in range(count)]
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise TextError(f"{self._path} has metadata of the unknown type {kind}; it may be of a newer GGUF version")


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys of the file's header with their values. Raises TextError if it is not a little-endian GGUF file of version 2 or 3."""
    with path.open("rb") as file:
        reader = _Reader(file, path)
        if reader.take(4) != b"GGUF":
            raise TextError(f"{path} is not a GGUF file")
        version = reader.scalar("I")
        if version not in (2, 3):
            raise TextError(f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read")
        reader.scalar("Q")  # number of tensors
        count = reader.scalar("Q")
        return {reader.string(): reader.value(reader.scalar("I")) for _ in range(count)}
