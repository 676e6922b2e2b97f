"""Token → bytes: what each token adds to a stream's text."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """Bytes of a byte-level token; a token outside the alphabet (an added one) is its own text."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def sentence_piece(token: str) -> bytes:
    """Bytes of a SentencePiece token: `<0x0A>` is a byte, U+2581 a space."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


def build_table(tokens: Iterable[str | None], *, is_byte_level: bool, added: dict[int, str], hidden: frozenset[int]) -> tuple[bytes, ...]:
    """Bytes by token id. `added` tokens are their own text; `hidden` ones (control tokens) and ids without a token are empty."""
    decode = byte_level if is_byte_level else sentence_piece
    table = []
    for token_id, token in enumerate(tokens):
        if token is None or token_id in hidden:
            table.append(b"")
        elif token_id in added:
            table.append(added[token_id].encode())
        else:
            table.append(decode(token))
    return tuple(table)
