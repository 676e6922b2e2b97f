"""SLAFeedback: as many sequences as keep the time per output token, by a cost that every step's observed time corrects."""

from __future__ import annotations

from decodefleet_agent.engine.chunks import prefill_room
from decodefleet_agent.engine.controllers.base import Decision, Situation
from decodefleet_agent.engine.controllers.static import static

DECODE_SHARE = 0.8  # of the objective that decoding alone may take; prompts live in the rest


def sla_feedback(situation: Situation) -> Decision:
    """Without an objective for the time per token, or without a measurement, the same as Static."""
    if situation.targets.time_per_output_token is None:
        return static(situation)
    return Decision(most_sequences(situation), prefill_room(situation))


def most_sequences(situation: Situation) -> int:
    """The largest batch whose decode step keeps the objective at the mean context of those that decode.

    Where not even one sequence alone keeps it, smaller batches would only add waiting: all places are given.
    """
    largest, work, cost = situation.limits.most_running, situation.work, situation.cost
    objective = situation.targets.time_per_output_token
    if cost is None or objective is None:
        return largest
    mean = work.context / work.decodes if work.decodes else cost.context

    def keeps(batch: int) -> bool:
        return cost.plain(batch, batch * mean) <= DECODE_SHARE * objective

    if keeps(largest) or not keeps(1):
        return largest
    low, high = 1, largest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
