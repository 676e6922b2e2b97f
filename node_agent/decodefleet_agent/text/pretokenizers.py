"""How byte-level BPE vocabularies cut text before merging, by the name that GGUF files give (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from decodefleet_agent.text.errors import TextError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`split` None: GPT-2's own pattern. `digits`: each digit stands alone first. `ignore_merges`: whole words of the vocabulary win."""

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        if self.split is not None:
            steps.append(pre_tokenizers.Split(Regex(self.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(digits=True)
_BY_NAME = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": PreTokenizer(split=_LLAMA3, ignore_merges=True, add_bos=True),
    "llama-v3": PreTokenizer(split=_LLAMA3, ignore_merges=True, add_bos=True),
    "llama3": PreTokenizer(split=_LLAMA3, ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizer(split=_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(split=_QWEN2, nfc=True),
    "tekken": PreTokenizer(split=_TEKKEN, ignore_merges=True, add_bos=True),
}


def by_name(name: str) -> PreTokenizer:
    """Raises TextError for a name that is not known: a wrong cut gives wrong tokens silently."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TextError(
            f"the model's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported are {', '.join(sorted(_BY_NAME))}. "
            "Use the model's directory with tokenizer.json instead of the GGUF file"
        ) from None
