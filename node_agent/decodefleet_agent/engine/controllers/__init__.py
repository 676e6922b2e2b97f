"""Batch controllers: before each step, how many sequences may run and how much of their prompts it may hold."""

from __future__ import annotations

from decodefleet_agent.engine.controllers.base import Controller
from decodefleet_agent.engine.controllers.sla_feedback import sla_feedback
from decodefleet_agent.engine.controllers.static import static

# By the name in `engine.batching.controller`; a learned one takes its place here, and picks below what sla_feedback allows.
CONTROLLERS: dict[str, Controller] = {"Static": static, "SLAFeedback": sla_feedback}
