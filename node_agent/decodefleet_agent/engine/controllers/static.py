"""Static: as many sequences as configured, whatever they do to each other."""

from __future__ import annotations

from decodefleet_agent.engine.chunks import prefill_room
from decodefleet_agent.engine.controllers.base import Decision, Situation


def static(situation: Situation) -> Decision:
    """maxBatch sequences; prompts take what their chunks ask for."""
    limits = situation.limits
    dynamic = limits.chunk == "Dynamic"
    return Decision(limits.most_running, prefill_room(situation) if dynamic else limits.max_batch_tokens)
