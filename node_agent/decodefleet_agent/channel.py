"""Frames between the server process and the engine process: a 4-byte little-endian length, then the payload."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import msgspec

from decodefleet_agent.messages import Commands, EngineMessage

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 * 1024 * 1024

encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(Commands).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode


class ChannelClosed(ConnectionError):
    """The other process closed its end, or died."""


def _checked(length: int) -> int:
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes is longer than {MAX_FRAME}: the two ends do not speak the same protocol")
    return length


def _framed(payload: bytes) -> bytes:
    return _LENGTH.pack(_checked(len(payload))) + payload


class Channel:
    """The engine's end: blocking sends, and receives that wait or take only what is there."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(True)
        self._buffer = bytearray()

    def send(self, payload: bytes) -> None:
        """Sends one frame. Raises ChannelClosed."""
        try:
            self._socket.sendall(_framed(payload))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the server process is gone") from error

    def receive_one(self) -> bytes:
        """Waits for one frame. Raises ChannelClosed."""
        while (frame := self._next_frame()) is None:
            self._read(wait=True)
        return frame

    def receive(self, wait: bool) -> list[bytes]:
        """All frames that have arrived whole; with `wait`, at least one. Raises ChannelClosed once all that came before it are taken."""
        closed: ChannelClosed | None = None
        try:
            while self._read(wait=False):
                pass
        except ChannelClosed as error:
            closed = error
        frames = []
        while (frame := self._next_frame()) is not None:
            frames.append(frame)
        if closed and not frames:
            raise closed
        return frames or ([self.receive_one()] if wait else [])

    def close(self) -> None:
        self._socket.close()

    def _read(self, wait: bool) -> bool:
        """Takes what the socket holds; False when that is nothing."""
        try:
            data = self._socket.recv(1 << 20, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise ChannelClosed("the server process is gone") from error
        if not data:
            raise ChannelClosed("the server process closed the channel")
        self._buffer += data
        return True

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _checked(_LENGTH.unpack_from(self._buffer)[0])
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame


class AsyncChannel:
    """The server's end. One task may receive while others send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> AsyncChannel:
        """Takes over one end of a Unix socket pair."""
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock))

    async def send(self, payload: bytes) -> None:
        """Sends one frame, waiting while the other end is slow. Raises ChannelClosed."""
        try:
            self._writer.write(_framed(payload))
            await self._writer.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the engine process is gone") from error

    async def receive_one(self) -> bytes:
        """Waits for one frame. Raises ChannelClosed."""
        try:
            header = await self._reader.readexactly(_LENGTH.size)
            return await self._reader.readexactly(_checked(_LENGTH.unpack(header)[0]))
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise ChannelClosed("the engine process closed the channel") from error

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):  # closing is all that was asked, and it is closed
            await self._writer.wait_closed()
