"""Every refusal names the field, its value and the limit, and leaves the agent as it was."""

from __future__ import annotations

import grpc
import pytest

from decodefleet.v1 import decoding_pb2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1.0}, ["sampling.temperature", "-1", "[0.0, 100.0]"]),
        ({"temperature": float("nan")}, ["sampling.temperature", "nan"]),
        ({"temperature": float("inf")}, ["sampling.temperature", "inf"]),
        ({"top_p": 0.0}, ["sampling.top_p", "0", "(0.0, 1.0]"]),
        ({"top_p": 1.5}, ["sampling.top_p", "1.5"]),
        ({"min_p": -0.5}, ["sampling.min_p", "-0.5", "[0.0, 1.0]"]),
        ({"repetition_penalty": 0.0}, ["sampling.repetition_penalty"]),
        ({"presence_penalty": 2.5}, ["sampling.presence_penalty", "2.5", "[-2.0, 2.0]"]),
        ({"frequency_penalty": -3.0}, ["sampling.frequency_penalty", "-3"]),
        ({"max_tokens": 0}, ["sampling.max_tokens", "0", "at least 1"]),
        ({"logprobs": 21}, ["sampling.logprobs", "21", "20"]),
        ({"n": 0}, ["sampling.n", "0"]),
        ({"n": 17}, ["sampling.n", "17", "16"]),
        ({"stop": ["x"] * 17}, ["sampling.stop", "17", "16"]),
        ({"stop": ["ok", ""]}, ["sampling.stop[1]", "0 bytes"]),
        ({"stop": ["€" * 86]}, ["sampling.stop[0]", "258", "256"]),
        ({"stop_token_ids": [1] * 65}, ["sampling.stop_token_ids", "65", "64"]),
        ({"stop_token_ids": [49152]}, ["sampling.stop_token_ids[0]", "49152"]),
    ],
)
def test_sampling(echo, tools, fields, words) -> None:
    refused(echo, tools.ask("hi", **fields), words)


def test_input(echo, tools) -> None:
    refused(echo, decoding_pb2.GenerateRequest(), ["input", "prompt, chat, token_ids"])
    refused(echo, tools.ask(""), ["prompt", "empty"])
    refused(echo, tools.ask("hi", request_id="x" * 129), ["request_id", "129", "128"])
    refused(echo, tools.ask(chat=[("robot", "hi")]), ["chat.messages[0].role", "'robot'", "system, user, assistant"])
    empty = tools.ask()
    empty.chat.SetInParent()
    refused(echo, empty, ["chat.messages", "empty"])
    tokens = tools.ask()
    tokens.token_ids.ids.extend([1, 99999])
    refused(echo, tokens, ["token_ids[1]", "99999", "49152"])
    none = tools.ask()
    none.token_ids.SetInParent()
    refused(echo, none, ["token_ids", "empty"])


def test_a_prompt_too_long_names_both_numbers(echo, tools) -> None:
    refused(echo, tools.ask(" a" * 600), ["prompt", "600", "511"])
    refused(echo, tools.ask(" a" * 30_000), ["prompt", "30000", "511"])  # long enough to be tokenised aside
    refused(echo, tools.ask(" a" * 500_000), ["prompt", "1000000 bytes", "512 tokens"])  # refused unread
    refused(echo, tools.ask(chat=[("user", " a" * 500_000)]), ["chat.messages", "1000000 bytes", "512 tokens"])
    assert tools.generate(echo, tools.ask(" a" * 511)).usage.completion_tokens == 1


def test_output_ends_with_the_context(echo, tools) -> None:
    answer = tools.generate(echo, tools.ask(" a" * 500, max_tokens=1000))
    assert answer.usage.completion_tokens == 12 and answer.finish() == decoding_pb2.FINISH_REASON_LENGTH


def test_resume(echo, tools) -> None:
    def resumed(**fields) -> decoding_pb2.GenerateRequest:
        request = tools.ask("a b c", **fields.pop("sampling", {}))
        request.resume.CopyFrom(decoding_pb2.Resume(**{"token_ids": [330], "seed": 4, **fields}))
        return request

    refused(echo, resumed(emitted_bytes=99), ["resume.emitted_bytes", "99"])
    refused(echo, resumed(token_ids=[70000]), ["resume.token_ids[0]", "70000"])
    refused(echo, resumed(sampling={"n": 2}), ["sampling.n", "2"])
    refused(echo, resumed(sampling={"seed": 5}), ["sampling.seed", "5", "4"])
    refused(echo, resumed(token_ids=[330] * 600), ["resume.token_ids", "603", "512"])
    refused(echo, resumed(numerics_profile="other"), ["'other'", "'echo-1'"], grpc.StatusCode.FAILED_PRECONDITION)


def test_refusals_are_counted_and_nothing_is_left(echo, tools) -> None:
    before = echo.load()
    refused(echo, tools.ask("hi", n=0), ["sampling.n"])
    after = echo.load()
    assert after.rejected_requests["invalid"] == before.rejected_requests["invalid"] + 1
    assert after.arrived_requests == before.arrived_requests and after.running + after.waiting == 0


@pytest.mark.parametrize("interval", [-0.1, 1.5, float("nan")])
def test_an_interval_out_of_bounds_is_refused(echo, tools, interval: float) -> None:
    refused(echo, tools.ask("x", message_interval=interval), ["message_interval", f"{interval:g}", "[0, 1]"])


def refused(agent, request, words: list[str], code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(agent.decoding.Generate(request, timeout=60))
    assert caught.value.code() is code, caught.value.details()
    assert [word for word in words if word not in caught.value.details()] == [], caught.value.details()
