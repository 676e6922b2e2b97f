"""The engine's loop in random programs, and by example: preemption, cancellation, prefix cache, order, limits."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from engine_world import LIMITS, VOCABULARY, alone, start, submit
from hypothesis import given, settings
from hypothesis import strategies as st

from decodefleet_agent.engine import sampling
from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.chunks import Chunk
from decodefleet_agent.engine.controllers import CONTROLLERS
from decodefleet_agent.engine.controllers.base import Controller, Decision, Limits, Situation
from decodefleet_agent.engine.kv_pool import PAGE_TOKENS, pages_for
from decodefleet_agent.messages import Cancel, Sampling, Submit


def whimsical(seed: int) -> Controller:
    """Decides by chance, within what a controller may."""
    chance = random.Random(seed)

    def decide(situation: Situation) -> Decision:
        limits = situation.limits
        return Decision(chance.randint(1, limits.most_running), min(chance.choice([1, 3, 16, 50, 5000]), limits.max_batch_tokens))

    return decide

prompts = st.builds(
    lambda shared, own: [7] * shared + own,
    st.integers(0, 70),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
)
requests = st.lists(st.tuples(prompts, st.integers(1, 40), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=10)


@settings(max_examples=100, deadline=None)
@given(
    requests=requests,
    cancelled=st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=4),
    max_batch=st.integers(1, 5),
    max_batch_tokens=st.sampled_from([16, 33, 200]),
    chunk=st.sampled_from([None, 5, 16, 64, "Dynamic", "Formula"]),
    whole_below=st.sampled_from([0, 50]),
    controller=st.sampled_from(sorted(CONTROLLERS)) | st.integers(0, 10_000),
    threshold=st.integers(1, 4),
    reserve=st.sampled_from([0, 64]),
    pages=st.sampled_from([8, 11, 40]),
)
def test_random_programs_give_every_stream_its_own_tokens(
    requests: list[tuple[list[int], int, int, int]],
    cancelled: dict[int, int],
    max_batch: int,
    max_batch_tokens: int,
    chunk: Chunk,
    whole_below: int,
    controller: str | int,
    threshold: int,
    reserve: int,
    pages: int,
) -> None:
    limits = Limits(max_batch, max_batch_tokens, chunk, threshold, whole_below, reserve_tokens=reserve)
    decide = CONTROLLERS[controller] if isinstance(controller, str) else whimsical(controller)
    streams = start(limits, pages, pages * PAGE_TOKENS, decide)
    for now in range(21):
        arriving = [n for n, (_, _, _, arrival) in enumerate(requests) if arrival == now]
        streams.handle(*(submit(n, requests[n][0], requests[n][1], priority=requests[n][2]) for n in arriving))
        streams.handle(*(Cancel(n) for n, at in cancelled.items() if at == now))
        streams.engine.check_integrity()
        if streams.engine.busy:
            streams.step()
    streams.finish()
    for number, (prompt, max_tokens, _, _) in enumerate(requests):
        wanted = alone(prompt, max_tokens, streams.engine.context_length)
        outputs = streams.outputs.get(number, [])
        if not outputs or outputs[-1].finish is None:
            assert number in cancelled
            assert not outputs or streams.tokens(number) == wanted[: len(streams.tokens(number))]
        elif len(prompt) >= streams.engine.context_length:
            assert streams.tokens(number) == []
        else:
            assert streams.tokens(number) == wanted and outputs[-1].finish == "length"
    stats = streams.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes_used) == (0, 0, 0)
    assert stats.queued_prompt_tokens == stats.queued_output_tokens == 0


def test_preemption_neither_loses_nor_repeats_a_token() -> None:
    limits = replace(LIMITS, reserve_tokens=0)
    streams = start(limits, pages=8)
    given = [[n] * 20 for n in range(4)]
    streams.handle(*(submit(n, prompt, max_tokens=40) for n, prompt in enumerate(given)))
    streams.finish()
    assert streams.engine.stats().preemptions > 0
    for number, prompt in enumerate(given):
        assert streams.tokens(number) == alone(prompt, 40, streams.engine.context_length)


def test_the_counters_count_each_token_once_although_preemption_computes_some_again() -> None:
    streams = start(replace(LIMITS, reserve_tokens=0), pages=8)
    streams.handle(*(submit(n, [n] * 20, max_tokens=40) for n in range(4)))
    streams.finish()
    stats = streams.engine.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generated_tokens) == (80, 0, 160)


def test_with_growth_reserved_the_same_load_is_not_preempted() -> None:
    streams = start(pages=8)
    streams.handle(*(submit(n, [n] * 20, max_tokens=40) for n in range(4)))
    streams.finish()
    assert streams.engine.stats().preemptions == 0


def test_a_cancelled_sequence_frees_its_pages_before_the_next_step() -> None:
    streams = start()
    streams.handle(submit(1, [1] * 40, max_tokens=100), submit(2, [2] * 20, max_tokens=100))
    streams.step()
    held = streams.engine.stats().kv_bytes_used
    streams.handle(Cancel(1))
    assert streams.engine.stats().kv_bytes_used == held - pages_for(41)
    streams.step()
    assert {span.sequence_id for span in streams.backend.batches[-1].spans} == {2}


def test_what_a_cancelled_sequence_generated_does_not_enter_the_prefix_cache() -> None:
    streams = start()
    streams.handle(submit(1, [1] * 32, max_tokens=100))
    for _ in range(40):
        streams.step()
    generated = streams.tokens(1)
    streams.handle(Cancel(1), submit(2, [1] * 32 + generated, max_tokens=1))
    streams.finish()
    assert streams.outputs[2][0].cached_prompt_tokens == 32


def test_a_finished_conversation_is_found_by_its_next_turn() -> None:
    streams = start()
    streams.handle(submit(1, [1] * 32, max_tokens=33))
    streams.finish()
    streams.handle(submit(2, [1] * 32 + streams.tokens(1) + [5], max_tokens=1))
    streams.finish()
    assert streams.outputs[2][0].cached_prompt_tokens == 64


def test_an_unknown_cancellation_is_nothing() -> None:
    streams = start()
    streams.handle(Cancel(99))
    assert not streams.engine.busy


def test_priority_then_arrival_decide_who_runs() -> None:
    streams = start(replace(LIMITS, max_batch=1))
    streams.handle(submit(1, [1], 1), submit(2, [2], 1), submit(3, [3], 1, priority=5))
    streams.finish()
    assert list(streams.outputs) == [3, 1, 2]


def test_long_prompts_come_in_chunks_and_short_ones_whole() -> None:
    limits = replace(LIMITS, max_batch_tokens=2048, chunk=100)
    streams = start(limits, pages=200, context=2000)
    streams.handle(submit(1, [1] * 600, 1), submit(2, [2] * 500, 1))
    streams.finish()
    lengths = [{span.sequence_id: span.length for span in batch.spans} for batch in streams.backend.batches]
    assert lengths[0] == {1: 100, 2: 500}
    assert [step[1] for step in lengths] == [100] * 6


def test_decoding_goes_on_beside_a_prompt_in_chunks() -> None:
    streams = start(replace(LIMITS, chunk=16, whole_below=0, max_batch_tokens=17))
    streams.handle(submit(1, [1], 30))
    streams.step()
    streams.handle(submit(2, [2] * 64, 1))
    for _ in range(4):
        streams.step()
        assert [span.length for span in streams.backend.batches[-1].spans] == [1, 16]


def test_from_the_threshold_on_prefill_goes_before_decode() -> None:
    tokens = {}
    for threshold in (2, 100):
        streams = start(Limits(8, 16, None, threshold))
        streams.handle(submit(1, [1], 20))
        streams.step()
        streams.handle(*(submit(n, [n] * 16, 3) for n in range(2, 6)))
        streams.step()
        first = [span.sequence_id for span in streams.backend.batches[-1].spans]
        assert first == ([2] if threshold == 2 else [1, 2])
        streams.finish()
        tokens[threshold] = {n: streams.tokens(n) for n in range(1, 6)}
    assert tokens[2] == tokens[100]

def test_no_step_exceeds_its_limits() -> None:
    streams = start(Limits(3, 24, None, 2))
    streams.handle(*(submit(n, [n] * 30, 10) for n in range(8)))
    streams.finish()
    assert max(batch.rows for batch in streams.backend.batches) <= 24
    assert max(len(batch.spans) for batch in streams.backend.batches) <= 3


def test_a_resumed_sequence_continues_where_it_stopped() -> None:
    whole = alone([3] * 20, 30, 400)
    streams = start()
    streams.handle(submit(1, [3] * 20, max_tokens=30, output_ids=whole[:11]))
    streams.finish()
    assert streams.tokens(1) == whole[11:]


def test_a_sequence_resumed_after_its_last_token_finishes_at_once() -> None:
    streams = start()
    sampling = Sampling(seed=1, max_tokens=5, stop_token_ids=(9,))
    streams.handle(Submit(1, [1], sampling, output_ids=[4, 9]), Submit(2, [1], sampling, output_ids=[1, 2, 3, 4, 5]))
    assert [streams.outputs[n][0].finish for n in (1, 2)] == ["stop", "length"]
    assert not streams.engine.busy


def test_a_stop_token_ends_the_sequence_and_is_its_last_token() -> None:
    wanted = alone([3], 40, 400)
    stop = wanted[5]
    streams = start()
    streams.handle(Submit(1, [3], Sampling(seed=1, max_tokens=40, stop_token_ids=(stop,))))
    streams.finish()
    assert streams.tokens(1) == wanted[: wanted.index(stop) + 1]
    assert streams.outputs[1][-1].finish == "stop"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [([], "empty"), ([1] * 401, "the context holds 400"), ([VOCABULARY], "token ids must be in 0 … 49"), ([-1], "token ids")],
)
def test_a_sequence_that_can_never_run_is_refused_and_its_neighbour_goes_on(prompt: list[int], says: str) -> None:
    streams = start()
    streams.handle(submit(1, [1], 4), submit(2, prompt, 4))
    streams.finish()
    assert streams.outputs[2][0].finish == "error" and says in (streams.outputs[2][0].error or "")
    assert streams.tokens(1) == alone([1], 4, 400)


def test_logits_that_are_not_finite_end_only_their_sequence() -> None:
    streams = start()
    honest = streams.backend.step

    def step(batch: Batch) -> np.ndarray:
        logits = honest(batch)
        for row, span in enumerate(span for span in batch.spans if span.samples):
            if span.sequence_id == 2:
                logits[row, 0] = np.nan
        return logits

    streams.backend.step = step  # type: ignore[method-assign]
    streams.handle(submit(1, [1], 6), submit(2, [2], 6))
    streams.finish()
    assert streams.outputs[2][-1].finish == "error" and "finite" in (streams.outputs[2][-1].error or "")
    assert streams.tokens(1) == alone([1], 6, 400)


def test_the_first_output_says_what_was_cached_and_when_it_left_the_queue() -> None:
    streams = start()
    streams.handle(submit(1, [1] * 40, 3))
    streams.finish()
    streams.handle(submit(2, [1] * 40, 3))
    streams.finish()
    first, *others = streams.outputs[2]
    assert first.cached_prompt_tokens == 32 and first.scheduled_at is not None
    assert all(output.cached_prompt_tokens is None and output.scheduled_at is None for output in others)
    assert streams.engine.stats().cached_prompt_tokens == 32


def test_a_request_that_cannot_be_sampled_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sampling.sample

    def failing(logits: np.ndarray, how: Sampling, prompt_ids: list[int], output_ids: list[int]) -> int:
        if prompt_ids == [1, 2, 3] and len(output_ids) == 2:
            raise IndexError("of the sampler")
        return sample(logits, how, prompt_ids, output_ids)

    monkeypatch.setattr(sampling, "sample", failing)
    streams = start()
    streams.handle(submit(0, [1, 2, 3], 9), submit(1, [4, 5], 9))
    streams.finish()
    assert [(o.finish, o.error) for o in streams.outputs[0][-1:]] == [("error", "sampling failed: IndexError: of the sampler")]
    assert streams.tokens(1) == alone([4, 5], 9, 400)
    assert streams.engine.stats().kv_bytes_used == 0


def test_a_pool_of_whole_contexts_runs_that_many_at_once() -> None:
    # Three sequences of 40 + 24 tokens fill 12 pages to the last one.
    streams = start(replace(LIMITS, max_batch=3), pages=12, context=64)
    streams.handle(*(submit(n, [n + 1] * 40, 24) for n in range(3)))
    for _ in range(4):
        streams.step()
    assert len(streams.engine.scheduler.running) == 3
    streams.finish()
    assert streams.engine.stats().preemptions == 0
