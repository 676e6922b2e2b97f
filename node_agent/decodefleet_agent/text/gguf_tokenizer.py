"""A tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as FastTokenizer

from decodefleet_agent.text import pretokenizers
from decodefleet_agent.text.chat import ChatTemplate
from decodefleet_agent.text.errors import TextError
from decodefleet_agent.text.gguf_metadata import read_metadata
from decodefleet_agent.text.token_bytes import build_table
from decodefleet_agent.text.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_PREFIX = "tokenizer.ggml."


def load(path: Path) -> Tokenizer:
    """Raises TextError if the file has no tokenizer, or one of a kind that is not supported."""
    return from_metadata(read_metadata(path), str(path))


def from_metadata(metadata: dict[str, Any], where: str) -> Tokenizer:
    """`metadata` as `read_metadata` gives it; `where` names the file in errors."""
    kind, tokens = metadata.get(_PREFIX + "model"), metadata.get(_PREFIX + "tokens")
    if not tokens:
        raise TextError(f"{where} has no tokenizer.ggml.tokens; use a GGUF file that carries its tokenizer")
    types = metadata.get(_PREFIX + "token_type") or [1] * len(tokens)
    if kind == "gpt2":
        fast, add_bos = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        fast, add_bos = _sentence_piece(metadata, tokens, types, where)
    else:
        raise TextError(f"{where} has a tokenizer of kind {kind!r}; supported are gpt2 (byte-level BPE) and llama (SentencePiece)")

    hidden = frozenset(i for i, kind_ in enumerate(types) if kind_ in (_UNKNOWN, _CONTROL))
    added = {i: tokens[i] for i, kind_ in enumerate(types) if kind_ in (_CONTROL, _USER_DEFINED)}
    fast.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in added if types[i] == _CONTROL])
    fast.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in added if types[i] == _USER_DEFINED])

    bos_id = metadata.get(_PREFIX + "bos_token_id")
    if metadata.get(_PREFIX + "add_bos_token", add_bos) and bos_id is not None:
        fast.post_processor = processors.TemplateProcessing(single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)])
    table = build_table(tokens, is_byte_level=kind == "gpt2", added=added, hidden=hidden)
    return Tokenizer(fast, table, _chat_template(metadata, tokens))


def _byte_level(metadata: dict[str, Any], tokens: list[str], where: str) -> tuple[FastTokenizer, bool]:
    merges = metadata.get(_PREFIX + "merges")
    if not merges:
        raise TextError(f"{where} has no tokenizer.ggml.merges; use a GGUF file that carries its tokenizer")
    pre = pretokenizers.by_name(metadata.get(_PREFIX + "pre", "gpt-2"))
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    fast = FastTokenizer(models.BPE(vocab=_vocabulary(tokens), merges=pairs, ignore_merges=pre.ignore_merges))
    fast.pre_tokenizer = pre.build()
    normalizer = pre.normalizer()
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.decoder = decoders.ByteLevel()
    return fast, pre.add_bos


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], types: list[int], where: str) -> tuple[FastTokenizer, bool]:
    scores = metadata.get(_PREFIX + "scores")
    if not scores:
        raise TextError(f"{where} has no tokenizer.ggml.scores; use a GGUF file that carries its tokenizer")
    vocabulary = _vocabulary(tokens)
    unknown = tokens[metadata.get(_PREFIX + "unknown_token_id", 0)]
    merges = _merges_by_score(tokens, types, scores, vocabulary)
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if metadata.get(_PREFIX + "add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    fast.normalizer = normalizers.Sequence(steps)
    fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast, True


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece scores highest; as BPE, that is every split of a piece, in order of score."""
    merges = []
    for token_id, token in enumerate(tokens):
        if types[token_id] in (_UNKNOWN, _CONTROL):
            continue
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[token_id], pair) for pair in known]
    merges.sort(key=lambda merge: merge[0])
    return [pair for _, pair in merges]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """The first id wins where a text stands twice (padding of the vocabulary)."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _chat_template(metadata: dict[str, Any], tokens: list[str]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if not source:
        return None

    def text_of(name: str) -> str:
        token_id = metadata.get(f"{_PREFIX}{name}_token_id")
        return tokens[token_id] if token_id is not None else ""

    return ChatTemplate(source, bos_token=text_of("bos"), eos_token=text_of("eos"))
