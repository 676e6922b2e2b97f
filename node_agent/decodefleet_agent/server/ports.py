"""The two gRPC servers and their ports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from decodefleet.config import TLS
from decodefleet_agent.server.credentials import server_credentials
from decodefleet_agent.server.errors import StartupError
from decodefleet_agent.server.health import Health

_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_COMMON = (
    # Two agents on one port would share its connections silently.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
# Clients that balance find new replicas when they connect again; gRPC spreads the age by 10 %, and open streams outlive it.
_SERVING = (*_COMMON, ("grpc.max_connection_age_ms", 30_000), ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000))


def serving_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_SERVING)


def control_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_COMMON)


def add_common_services(server: grpc.aio.Server, health: Health, services: list[str]) -> None:
    """Health and reflection, which names `services` too."""
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection([*services, health_name, reflection.SERVICE_NAME], server)


def bind(server: grpc.aio.Server, host: str, port: int, tls: TLS | None, what: str) -> int:
    """The port, drawn by the system for 0. Raises StartupError."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    credentials = server_credentials(tls) if tls is not None else None
    try:
        bound = server.add_secure_port(address, credentials) if credentials is not None else server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise StartupError(f"{what}: {address} cannot be bound; another process has the port, or this machine lacks the address")
    return bound


def write_ports(path: str, ports: dict[str, int]) -> None:
    """Whole or not at all: who waits for the file may read it at once. Raises StartupError."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(ports) + "\n")
        draft.replace(target)
    except OSError as error:
        raise StartupError(f"portsFile: {path} cannot be written: {error.strerror}") from error
