"""Text out: whole characters, never a part of a stop string, and the same text however the bytes are cut into tokens."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from decodefleet_agent.text.stops import StopAutomaton
from decodefleet_agent.text.stream import TextStream

# Few letters, so that stop strings occur and overlap; characters of one to four bytes, and bytes that are no character.
PIECES = st.sampled_from([b"a", b"b", b"ab", b"\n", "é".encode(), "€".encode(), "🎉".encode(), b"\xff", b"\xe2", b"\x82", b"\xf0\x9f"])
STOPS = st.lists(st.text(alphabet="ab\né€🎉", min_size=1, max_size=4), max_size=4)


def reference(data: bytes, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first (the longest of those complete together), and whether there is one."""
    for end in range(1, len(data) + 1):
        lengths = [len(stop.encode()) for stop in stops if data[:end].endswith(stop.encode())]
        if lengths:
            return data[: end - max(lengths)].decode("utf-8", "replace"), True
    return data.decode("utf-8", "replace"), False


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def run(tokens: list[bytes], stops: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(tokens, stops)
    texts = []
    for token_id in range(len(tokens)):
        texts.append(stream.push(token_id))
        if stream.stopped:
            return texts, stream
    return [*texts, stream.finish()], stream


@settings(max_examples=600, deadline=None)
@given(st.lists(PIECES, max_size=24).map(b"".join), st.lists(st.integers(0, 200), max_size=24), STOPS)
@example(b"xab", [1, 2], ["ab"])
@example("a€b".encode(), [1, 2, 3], ["€b"])
@example(b"abab", [2], ["abc", "bab"])
@example(b"\xe2ab", [1, 2], ["ab"])
def test_text_equals_reference(data: bytes, cuts: list[int], stops: list[str]) -> None:
    texts, stream = run(cut(data, cuts), stops)
    expected, stopped = reference(data, stops)
    assert "".join(texts) == expected
    assert stream.stopped == stopped
    assert stream.emitted_bytes == len(expected.encode())


@settings(max_examples=600, deadline=None)
@given(st.lists(PIECES, max_size=24).map(b"".join), st.lists(st.integers(0, 200), max_size=24), STOPS)
def test_nothing_early_and_nothing_late(data: bytes, cuts: list[int], stops: list[str]) -> None:
    """After each token, the text so far is the longest that no continuation can take back."""
    tokens = cut(data, cuts)
    stream = TextStream(tokens, stops)
    seen, sent = b"", ""
    for token_id, token in enumerate(tokens):
        seen += token
        sent += stream.push(token_id)
        if stream.stopped:
            return
        encoded = [stop.encode() for stop in stops]
        held = max((n for stop in encoded for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0)
        certain = seen[: len(seen) - held]
        # A trailing part of a character is not text yet.
        complete = next(certain[: len(certain) - n] for n in range(4) if _whole(certain, n))
        assert sent == complete.decode("utf-8", "replace")


def _whole(data: bytes, n: int) -> bool:
    """Whether the last n bytes are the beginning of a character, and the shortest such tail was not passed over."""
    if n > len(data):
        return False
    tail = data[len(data) - n :]
    longest = max((k for k in range(1, min(3, len(data)) + 1) if _begins(data[len(data) - k :])), default=0)
    return len(tail) == longest


def _begins(tail: bytes) -> bool:
    """Whether some bytes after the tail make it one character."""
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


def test_longest_of_stops_that_end_together() -> None:
    automaton = StopAutomaton([b"b", b"ab"])
    state = automaton.step(automaton.step(0, ord("a")), ord("b"))
    assert automaton.matched(state) == 2


def test_incomplete_character_only_at_the_end() -> None:
    stream = TextStream([b"ok \xe2\x82", b"\xac", b"\xf0\x9f"], [])
    assert [stream.push(0), stream.push(1), stream.push(2), stream.finish()] == ["ok ", "€", "", "\ufffd"]
