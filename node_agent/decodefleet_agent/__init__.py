"""The node agent: a gRPC server and the decoding engine behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decodefleet_agent.doors import BatchController, MemoryPool, dynamic_chunk_scheduler

__all__ = ["BatchController", "MemoryPool", "dynamic_chunk_scheduler"]


def __getattr__(name: str) -> object:
    """Loads the engine's parts when somebody asks for them: the command line must not wait for numpy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from decodefleet_agent import doors

    return getattr(doors, name)
