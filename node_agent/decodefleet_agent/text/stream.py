"""The text of one stream: bytes in, whole characters out, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from decodefleet_agent.text.stops import StopAutomaton


class TextStream:
    """Feed it the tokens in order. `emitted_bytes` counts the UTF-8 bytes of all text given out."""

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str]) -> None:
        self._token_bytes = token_bytes
        self._automaton = StopAutomaton([stop.encode() for stop in stops]) if stops else None
        self._state = 0
        self._held = bytearray()
        # Incomplete characters wait inside; what can never become valid comes out as U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.emitted_bytes = 0
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that the token makes ready. After it, `stopped` says whether a stop string was completed; then nothing follows."""
        data = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        if self._automaton is None:
            return self._emit(data)
        for at, byte in enumerate(data):
            self._state = self._automaton.step(self._state, byte)
            if length := self._automaton.matched(self._state):
                self._held += data[: at + 1]
                text = self._emit(bytes(self._held[: len(self._held) - length]), final=True)
                self._held.clear()
                self.stopped = True
                return text
        self._held += data
        ready = len(self._held) - self._automaton.depth[self._state]
        text = self._emit(bytes(self._held[:ready]))
        del self._held[:ready]
        return text

    def finish(self) -> str:
        """The rest, when the stream ends without a stop string: held-back text, and U+FFFD for an incomplete character."""
        if self.stopped:
            return ""
        text = self._emit(bytes(self._held), final=True)
        self._held.clear()
        return text

    def _emit(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        self.emitted_bytes += len(text.encode())
        return text
