"""The engine: takes commands, and makes steps of schedule → run → postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from decodefleet_agent.engine.backends.base import Backend
from decodefleet_agent.engine.batch import Batch
from decodefleet_agent.engine.controllers.base import Controller, Decision, Limits
from decodefleet_agent.engine.controllers.static import static
from decodefleet_agent.engine.helper import Helper
from decodefleet_agent.engine.kv_pool import KVPool
from decodefleet_agent.engine.postprocess import Fresh, finish_reason, postprocess
from decodefleet_agent.engine.scheduler import Scheduler
from decodefleet_agent.engine.sequence import Sequence
from decodefleet_agent.engine.sparsity import pool_context
from decodefleet_agent.engine.step_cost import StepCost, Work, chunk_pairs
from decodefleet_agent.messages import Cancel, Output, Stats, StepResult, Submit, Targets


@dataclass(frozen=True)
class Step:
    """A step that is through, before anyone is told. `seconds`: from its scheduling to the last of its tokens."""

    batch: Batch
    decision: Decision
    fresh: Fresh
    seconds: float


class Engine:
    """Sequences in flight over one backend. `context_length` bounds prompt and output together; the pool holds at least that much.

    `cost`: what warm-up measured of the backend's steps; None where it did not run.
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        pool: KVPool,
        page_bytes: int,
        context_length: int,
        vocabulary_size: int,
        controller: Controller = static,
        cost: StepCost | None = None,
    ) -> None:
        self.backend = backend
        self.pool = pool
        self.scheduler = Scheduler(limits, pool)
        self.context_length = context_length
        self.controller = controller
        self.cost = cost
        self.targets = Targets()
        self.sequences: dict[int, Sequence] = {}
        self._page_bytes = page_bytes
        self._vocabulary_size = vocabulary_size
        self._arrivals = 0
        self._prompt_tokens = self._cached_prompt_tokens = self._generated_tokens = self._steps = 0
        self._busy_seconds = self._backend_seconds = 0.0
        self._decided = Decision(limits.most_running, limits.max_batch_tokens)
        self._helper = Helper()

    @property
    def busy(self) -> bool:
        return bool(self.sequences)

    def handle(self, commands: Iterable[Submit | Cancel | Targets]) -> list[Output]:
        """Takes sequences in and out. The outputs are those of sequences that end without a step."""
        outputs = []
        for command in commands:
            match command:
                case Submit():
                    outputs += self._submit(command)
                case Cancel():
                    self._cancel(command.sequence_id)
                case Targets():
                    self.targets = command
        return outputs

    def step(self) -> StepResult:
        """Computes one batch, and says what came of it."""
        return self.report(self.advance())

    def advance(self, meanwhile: Callable[[], object] | None = None) -> Step:
        """Computes one batch. `meanwhile` runs beside the backend, when the engine is at rest: the place to report the step before."""
        started = time.monotonic()
        situation = self.scheduler.situation(self.targets, self.cost)
        decision = self.controller(situation)
        batch = self.scheduler.schedule(decision, prefill_first=situation.burst)
        logits, tokens = self._run(batch, meanwhile)
        fresh = postprocess(batch, logits, tokens, self.sequences, self.scheduler, self.context_length)
        self._count(batch, fresh.outputs)
        for output in fresh.outputs:
            if output.finish:
                del self.sequences[output.sequence_id]
        seconds = time.monotonic() - started
        self._steps += 1
        self._busy_seconds += seconds
        return Step(batch, decision, fresh, seconds)

    def report(self, step: Step) -> StepResult:
        """What to tell of a step, once. The numbers are those of the present moment; the cost learns from the step."""
        if self.cost is not None:
            self.cost = self.cost.corrected(_work(step.batch), step.seconds)
        self._decided = step.decision
        stats = self.stats(step_seconds=step.seconds, batch=len(step.batch.spans), batch_tokens=step.batch.rows)
        return StepResult(step.fresh.complete(), stats)

    def _run(self, batch: Batch, meanwhile: Callable[[], object] | None) -> tuple[np.ndarray, list[int | str]]:
        """Logits and tokens of the rows that sample."""
        draws = [self.sequences[span.sequence_id] for span in batch.spans if span.samples]
        if meanwhile is not None:
            self._helper.start(meanwhile)
        started = time.monotonic()
        logits = self.backend.step(batch)
        tokens = self.backend.sample(logits, draws)
        self._backend_seconds += time.monotonic() - started
        if meanwhile is not None:
            self._helper.wait()
        return logits, tokens

    def stats(self, step_seconds: float = 0.0, batch: int = 0, batch_tokens: int = 0) -> Stats:
        """The engine's numbers now."""
        scheduler, pool = self.scheduler, self.pool
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_prompt_tokens=sum(max(0, s.prompt_length - s.computed) for s in self.sequences.values()),
            queued_output_tokens=sum(s.output_left for s in self.sequences.values()),
            kv_bytes_used=pool.used * self._page_bytes,
            kv_bytes_total=pool.total * self._page_bytes,
            kv_bytes_cached=pool.cached * self._page_bytes,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=scheduler.preemptions,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
            backend_seconds=self._backend_seconds,
            step_seconds=step_seconds,
            batch=batch,
            batch_tokens=batch_tokens,
            batch_limit=self._decided.max_running,
            prefill_limit=self._decided.prefill_tokens,
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pool, scheduler and sequences agree."""
        self.scheduler.check_integrity()
        known = {s.sequence_id for s in (*self.scheduler.waiting, *self.scheduler.running)}
        if known != set(self.sequences):
            raise RuntimeError(f"the scheduler has sequences {known}, and the engine {set(self.sequences)}")

    def _submit(self, submit: Submit) -> list[Output]:
        if submit.sequence_id in self.sequences:
            raise ValueError(f"sequence {submit.sequence_id} is running already")
        self._arrivals += 1
        sequence = Sequence(
            sequence_id=submit.sequence_id,
            tokens=[*submit.prompt_ids, *submit.output_ids],
            prompt_length=len(submit.prompt_ids),
            sampling=submit.sampling,
            priority=submit.priority,
            arrival=self._arrivals,
        )
        if error := self._refusal(sequence):
            return [Output(sequence.sequence_id, [], finish="error", error=error)]
        if finish := finish_reason(sequence, self.context_length):
            return [Output(sequence.sequence_id, [], finish=finish)]
        self.sequences[sequence.sequence_id] = sequence
        self.scheduler.add(sequence)
        return []

    def _refusal(self, sequence: Sequence) -> str | None:
        length = len(sequence.tokens)
        if not sequence.prompt_length:
            return "the prompt is empty; send at least one token"
        if length > self.context_length:
            return f"prompt and output have {length} tokens, and the context holds {self.context_length}; shorten the prompt"
        if (room := pool_context(length, self.pool.total, self.scheduler.limits.window)) < length:
            return f"prompt and output have {length} tokens, and the KV pool holds {room}; raise engine.kvCache.memory"
        if min(sequence.tokens) < 0 or max(sequence.tokens) >= self._vocabulary_size:
            return f"token ids must be in 0 … {self._vocabulary_size - 1}"
        return None

    def _cancel(self, sequence_id: int) -> None:
        """A sequence that has just finished is unknown here; its cancellation crossed its last output."""
        if sequence := self.sequences.pop(sequence_id, None):
            self.scheduler.cancel(sequence)

    def _count(self, batch: Batch, outputs: list[Output]) -> None:
        for output in outputs:
            self._generated_tokens += len(output.token_ids)
            self._cached_prompt_tokens += output.cached_prompt_tokens or 0
        for span in batch.spans:
            sequence = self.sequences[span.sequence_id]
            if sequence.counted_prompt < (computed := min(span.start + span.length, sequence.prompt_length)):
                self._prompt_tokens += computed - sequence.counted_prompt
                sequence.counted_prompt = computed


def _work(batch: Batch) -> Work:
    """What the step computed, for its cost. The last token of a prompt on its own counts as a decoding row: it costs the same."""
    prompts = [span for span in batch.spans if span.length > 1]
    return Work(
        decodes=len(batch.spans) - len(prompts),
        context=sum(span.start + 1 for span in batch.spans if span.length == 1),
        prefill=sum(span.length for span in prompts),
        pairs=sum(chunk_pairs(span.start, span.length) for span in prompts),
    )
