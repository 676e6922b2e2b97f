"""Names of gRPC metadata that agents and the gateway add to an answer."""

from __future__ import annotations

AGENT = "decodefleet-agent"  # initial: the agent that the gateway chose
ATTEMPTS = "decodefleet-attempts"  # trailing: how many agents the gateway asked
ENGINE_DIED = "decodefleet-engine-died"  # trailing: the engine died with this request in it, and the request may be why

MAX_DEATHS = 2  # engines that one request may be in when they die; it is not sent again after that
