"""The samples of one request: engine outputs in, deltas for the client out, tokens counted exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from decodefleet.v1 import decoding_pb2 as pb
from decodefleet_agent.messages import Output, Sampling, TokenLogprob
from decodefleet_agent.text.stream import TextStream

_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class Sample:
    """One stream of tokens. `finished` is final; what the engine computed past a stop string is dropped."""

    def __init__(self, sampling: Sampling, token_bytes: Sequence[bytes], stops: Sequence[str]) -> None:
        self._text = TextStream(token_bytes, stops)
        self._sampling = sampling
        self.tokens = 0
        self.finished = False

    def resume(self, token_ids: Sequence[int], emitted_bytes: int) -> pb.SampleDelta | None:
        """Takes in what another replica generated; the delta is the text of it that the client lacks, with the finish if it is complete.

        Raises ValueError if the client claims more text than these tokens have.
        """
        text = "".join(self._take(token_id) for token_id in itertools.takewhile(lambda _: not self.finished, token_ids))
        if self._text.stopped or (token_ids and token_ids[-1] in self._sampling.stop_token_ids):
            finish = pb.FINISH_REASON_STOP
        elif len(token_ids) >= self._sampling.max_tokens:
            finish = pb.FINISH_REASON_LENGTH
        else:
            finish = pb.FINISH_REASON_UNSPECIFIED
        if finish:
            text += self._text.finish()
            self.finished = True
        data = text.encode()
        if emitted_bytes > len(data):
            raise ValueError(f"resume.emitted_bytes: is {emitted_bytes}; resume.token_ids make {len(data)} bytes of text")
        try:
            missing = data[emitted_bytes:].decode()
        except UnicodeDecodeError:
            raise ValueError(f"resume.emitted_bytes: is {emitted_bytes}, in the middle of a character") from None
        if not missing and not finish:
            return None
        return pb.SampleDelta(sample_index=self._sampling.sample_index, text=missing, finish_reason=finish)

    def feed(self, output: Output) -> pb.SampleDelta:
        """What the output brings the client, in one delta."""
        text = ""
        used = 0
        for token_id in output.token_ids:
            text += self._take(token_id)
            used += 1
            if self.finished:
                break
        finish = pb.FINISH_REASON_STOP if self._text.stopped else _FINISH.get(output.finish or "", pb.FINISH_REASON_UNSPECIFIED)
        if finish:
            text += self._text.finish()
            self.finished = True
        index = self._sampling.sample_index
        delta = pb.SampleDelta(sample_index=index, text=text, token_ids=output.token_ids[:used], finish_reason=finish)
        if output.logprobs:
            delta.logprobs.extend(_logprob(logprob) for logprob in output.logprobs[:used])
        return delta

    def _take(self, token_id: int) -> str:
        self.tokens += 1
        if token_id in self._sampling.stop_token_ids:
            return ""
        text = self._text.push(token_id)
        self.finished = self._text.stopped
        return text


def _logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TokenLogprob.Alternative(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def merge(deltas: Sequence[pb.SampleDelta]) -> list[pb.SampleDelta]:
    """One delta per sample out of those that became ready together, in order of the samples' first."""
    if len(deltas) == 1:
        return list(deltas)
    merged: dict[int, pb.SampleDelta] = {}
    for delta in deltas:
        known = merged.setdefault(delta.sample_index, delta)
        if known is not delta:
            known.text += delta.text
            known.token_ids.extend(delta.token_ids)
            known.logprobs.extend(delta.logprobs)
            known.finish_reason = delta.finish_reason
    return list(merged.values())
