"""Where a model's files are: turns `hf://`, `file://` and `package://` addresses into paths."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

_HF = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(?P<file>/[^@]+)?(@(?P<revision>[\w./-]+))?$")
_HF_PATTERNS = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "chat_template*",
    "vocab.json",
    "merges.txt",
]
_FORMS = "write it as hf://org/name@revision, file:///path or package://python_package/file.gguf"


class ModelError(Exception):
    """The model cannot be used as it is; the message says what to change."""


def resolve(uri: str) -> Path:
    """The file or directory that a model address names, downloaded first if it is `hf://`. Raises ModelError."""
    scheme, separator, rest = uri.partition("://")
    if not separator or not rest:
        raise ModelError(f"model address {uri!r} has no scheme; {_FORMS}")
    if scheme == "file":
        return _file(uri)
    if scheme == "package":
        return _package(uri, rest)
    if scheme == "hf":
        return _hugging_face(uri, rest)
    if scheme == "pvc":
        raise ModelError(f"model address {uri!r} names a volume claim, which only pods can mount; here, use file:///path")
    raise ModelError(f"model address {uri!r} has the unknown scheme {scheme!r}; {_FORMS}")


def _file(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc or not parts.path.startswith("/"):
        raise ModelError(f"model address {uri!r} needs an absolute path and no host: file:///models/x has three slashes")
    path = Path(unquote(parts.path))
    if not path.exists():
        raise ModelError(f"model address {uri!r}: there is no {path}; put the model there, or correct model.uri")
    return path


def _package(uri: str, rest: str) -> Path:
    name, _, inside = rest.partition("/")
    if not name.isidentifier() or not inside or ".." in PurePosixPath(inside).parts:
        raise ModelError(f"model address {uri!r} must be package://python_package/file inside the package")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model address {uri!r}: the Python package {name} is not installed; pip install it in the agent's environment or image"
        )
    for location in spec.submodule_search_locations:
        if (path := Path(location) / inside).exists():
            return path
    raise ModelError(f"model address {uri!r}: the package {name} holds no {inside}; correct the file's name")


def _hugging_face(uri: str, rest: str) -> Path:
    match = _HF.match(rest)
    if not match:
        raise ModelError(f"model address {uri!r} must be hf://org/name, hf://org/name@revision or hf://org/name/file.gguf@revision")
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo, file, revision = match["repo"], match["file"], match["revision"]
    try:
        if file:
            return Path(hf_hub_download(repo, file[1:], revision=revision))
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HF_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        detail = str(error).strip().splitlines()
        raise ModelError(
            f"model address {uri!r} could not be downloaded ({detail[0] if detail else type(error).__name__}); "
            "check the name and revision, the network, and HF_TOKEN if the model is gated"
        ) from error
