"""grpc.health.v1, one state for both ports, and the names that it answers for."""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2

from decodefleet.v1 import control_pb2, decoding_pb2

DECODING = decoding_pb2.DESCRIPTOR.services_by_name["Decoding"].full_name
AGENT_CONTROL = control_pb2.DESCRIPTOR.services_by_name["AgentControl"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The agent as a whole ("") and Decoding follow the agent's readiness; AgentControl answers in every state."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def start(self) -> None:
        await self._set(_NOT_SERVING)
        await self.servicer.set(AGENT_CONTROL, _SERVING)

    async def serving(self) -> None:
        await self._set(_SERVING)

    async def not_serving(self) -> None:
        await self._set(_NOT_SERVING)

    async def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", DECODING):
            await self.servicer.set(name, status)
