"""Sequences under a sliding window: pages come with the chunks and go back when no later row sees them, and no stream notices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_world import LIMITS, VOCABULARY, Streams, alone, start, submit
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.controllers.base import Limits
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, pages_for
from decodefleet_agent.engine.sparsity import Window
from decodefleet_agent.messages import Cancel

WINDOWED = replace(LIMITS, window=Window(sinks=5, tokens=40))


def used(streams: Streams) -> int:
    return streams.engine.pool.used


def peak(streams: Streams) -> int:
    """Steps until all is done; the most pages that were held, while a step was computed."""
    held = []
    compute = streams.backend.step

    def step(batch: Batch) -> np.ndarray:
        held.append(used(streams))
        return compute(batch)

    streams.backend.step = step  # type: ignore[method-assign]
    streams.finish()
    return max(held)


@pytest.mark.parametrize("sinks", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64])
def test_what_is_unseen_is_seen_by_no_later_row(sinks: int, tokens: int) -> None:
    window = Window(sinks, tokens)
    for position in range(300):
        visible = {at // PAGE_TOKENS for at in range(position + 1) if at < sinks or at > position - tokens}
        before = set(range(position // PAGE_TOKENS + 1))
        assert set(window.unseen(position)) & before == {page for page in before - visible if page >= pages_for(sinks)}
        assert len(before - set(window.unseen(position))) <= window.pages


prompts = st.builds(
    lambda shared, own: [7] * shared + own,
    st.integers(0, 200),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=150),
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 60), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=8),
    cancelled=st.dictionaries(st.integers(0, 7), st.integers(0, 20), max_size=3),
    sinks=st.sampled_from([0, 3, 16, 21]),
    tokens=st.sampled_from([16, 17, 32, 50]),
    max_batch=st.integers(1, 5),
    max_batch_tokens=st.sampled_from([16, 33, 200]),
    chunk=st.sampled_from([None, 5, 64]),
    reserve=st.sampled_from([0, 64]),
    spare=st.sampled_from([0, 1, 4, 30]),
)
def test_random_programs_give_every_stream_its_own_tokens(
    requests: list[tuple[list[int], int, int, int]],
    cancelled: dict[int, int],
    sinks: int,
    tokens: int,
    max_batch: int,
    max_batch_tokens: int,
    chunk: int | None,
    reserve: int,
    spare: int,
) -> None:
    window = Window(sinks, tokens)
    limits = Limits(max_batch, max_batch_tokens, chunk, 3, whole_below=0, reserve_tokens=reserve, window=window)
    streams = start(limits, window.pages + spare)
    for now in range(21):
        arriving = [n for n, (_, _, _, arrival) in enumerate(requests) if arrival == now]
        streams.handle(*(submit(n, requests[n][0], requests[n][1], priority=requests[n][2]) for n in arriving))
        streams.handle(*(Cancel(n) for n, at in cancelled.items() if at == now))
        if streams.engine.busy:
            streams.step()
    streams.finish()
    for number, (prompt, max_tokens, _, _) in enumerate(requests):
        if number not in cancelled:
            assert streams.tokens(number) == alone(prompt, max_tokens, streams.engine.context_length, window)
    assert used(streams) == 0


def test_a_long_prompt_holds_its_window_and_a_chunk() -> None:
    streams = start(replace(WINDOWED, max_batch_tokens=128), pages=16, context=4000)
    streams.handle(submit(1, [n % VOCABULARY for n in range(3000)], max_tokens=200))
    assert 128 // PAGE_TOKENS < peak(streams) <= WINDOWED.window.pages + 128 // PAGE_TOKENS
    assert streams.tokens(1) == alone([n % VOCABULARY for n in range(3000)], 200, 4000, WINDOWED.window)


def test_20000_tokens_hold_less_than_35_percent_of_their_pages() -> None:
    limits = Limits(max_batch=4, max_batch_tokens=2048, chunk=None, batch_size_threshold=8, window=Window(16, 256))
    streams = start(limits, pages=pages_for(20_064), context=20_064)
    streams.handle(submit(1, [n % VOCABULARY for n in range(20_000)], max_tokens=64))
    assert 2048 / 20_064 < peak(streams) / pages_for(20_064) <= 0.12


def test_a_short_window_leaves_room_for_many() -> None:
    streams = start(replace(WINDOWED, max_batch=4), pages=4 * WINDOWED.window.pages, context=4000)
    streams.handle(*(submit(n, [n] * 100, max_tokens=300) for n in range(4)))
    for _ in range(20):
        streams.step()
    assert streams.engine.stats().running == 4
    streams.finish()
    assert streams.engine.stats().preemptions == 0


def test_a_prefix_of_which_only_sinks_and_window_are_known_is_reused() -> None:
    streams = start(WINDOWED, pages=12, context=4000)
    prompt = [n * 3 % VOCABULARY for n in range(800)]
    streams.handle(submit(1, prompt))
    streams.finish()
    streams.handle(submit(2, prompt))
    streams.finish()
    assert streams.outputs[2][0].cached_prompt_tokens == 784
    assert streams.tokens(2) == streams.tokens(1) == alone(prompt, 8, 4000, WINDOWED.window)


def test_pages_that_were_given_back_stay_in_the_prefix_cache() -> None:
    streams = start(WINDOWED, pages=64)
    prompt = [n * 3 % VOCABULARY for n in range(200)]
    streams.handle(submit(1, prompt, max_tokens=100))
    while len(streams.outputs.get(1, [])) < 50:
        streams.step()
    assert streams.engine.pool.cached >= 200 // PAGE_TOKENS - WINDOWED.window.pages
    streams.handle(submit(2, prompt))
    streams.finish()
    assert streams.outputs[2][0].cached_prompt_tokens == 192


def test_what_no_window_fits_is_refused() -> None:
    streams = start(WINDOWED, pages=WINDOWED.window.pages - 1, context=4000)
    streams.engine.context_length = 4000
    streams.handle(submit(1, [1] * 200))
    assert "raise engine.kvCache.memory" in (streams.outputs[1][0].error or "")
