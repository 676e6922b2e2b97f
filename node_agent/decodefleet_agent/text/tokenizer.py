"""The model's tokenizer as the server uses it: text to token ids, token ids to bytes, messages to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from decodefleet_agent.text.chat import ChatTemplate, Message
from decodefleet_agent.text.errors import TextError


@dataclass(frozen=True)
class Tokenizer:
    """`token_bytes` has one entry per token id; control tokens are empty there."""

    fast: FastTokenizer = field(repr=False)
    token_bytes: tuple[bytes, ...] = field(repr=False)
    chat_template: ChatTemplate | None

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest text that one token stands for, control tokens included."""
        added = (token.content.encode() for token in self.fast.get_added_tokens_decoder().values())
        return max(map(len, (*self.token_bytes, *added)), default=1)

    def encode(self, text: str) -> list[int]:
        """Raw text to ids. Special tokens written out in it become those tokens; the model's BOS is put in front where it has one."""
        return self.fast.encode(text, add_special_tokens=True).ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages, through the chat template, to ids. Raises TextError if the template refuses them or there is none."""
        if self.chat_template is None:
            raise TextError("the model has no chat template; send `prompt` or `token_ids` instead")
        return self.fast.encode(self.chat_template.render(messages), add_special_tokens=False).ids


def load_tokenizer(path: Path) -> Tokenizer:
    """From a GGUF file, or a directory in Hugging Face's layout. Raises TextError."""
    from decodefleet_agent.text import gguf_tokenizer, huggingface

    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not (path / "tokenizer.json").is_file() and files:
            return gguf_tokenizer.load(files[0])
        return huggingface.load(path)
    if path.suffix != ".gguf":
        raise TextError(f"{path} is no GGUF file; name one that ends in .gguf, or a directory with config.json and tokenizer.json")
    return gguf_tokenizer.load(path)
