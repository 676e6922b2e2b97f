"""A tokenizer from a directory in Hugging Face's layout: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from decodefleet_agent.text.chat import ChatTemplate
from decodefleet_agent.text.errors import TextError
from decodefleet_agent.text.token_bytes import build_table
from decodefleet_agent.text.tokenizer import Tokenizer


def load(directory: Path) -> Tokenizer:
    """Raises TextError if a file is missing or cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TextError(f"{directory} has no tokenizer.json; add the model's fast tokenizer to it, or use a GGUF file")
    try:
        fast = FastTokenizer.from_file(str(path))
        description = json.loads(path.read_text())
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise TextError(f"{path} cannot be read: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")

    entries = description.get("added_tokens", [])
    added = {entry["id"]: entry["content"] for entry in entries}
    hidden = frozenset(entry["id"] for entry in entries if entry.get("special"))
    size = fast.get_vocab_size(with_added_tokens=True)
    highest = max(fast.get_vocab(with_added_tokens=True).values(), default=size - 1)
    tokens = [fast.id_to_token(token_id) for token_id in range(highest + 1)]
    table = build_table(tokens, is_byte_level="ByteLevel" in _types(description.get("decoder")), added=added, hidden=hidden)
    return Tokenizer(fast, table, _chat_template(directory, config))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise TextError(f"{path} is not JSON: {error}") from error


def _types(decoder: dict[str, Any] | None) -> set[str]:
    """The decoder's type, and those of its parts."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_types(part) for part in decoder.get("decoders", [])))


def _text_of(token: str | dict[str, Any] | None) -> str:
    return (token.get("content", "") if isinstance(token, dict) else token) or ""


def _chat_template(directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        return None
    return ChatTemplate(source, bos_token=_text_of(config.get("bos_token")), eos_token=_text_of(config.get("eos_token")))
