"""Who holds which page of the KV pool, and which full pages the prefix cache still knows.

A page is free, held by sequences (reference count > 0), or kept by the prefix cache alone until someone needs it.
Only full pages are shared, and a sequence always computes at least its last token into a page of its own: no page is
written while two sequences hold it, so nothing has to be copied on write.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

PAGE_TOKENS = 16
GIVEN_BACK = -1  # in a sequence's pages: one that none of its rows sees any more


def pages_for(tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // PAGE_TOKENS)


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a full page: its own tokens after all those before it."""
    return hashlib.blake2b(parent + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()


class KVPool:
    """Page numbers 0 … total - 1. The memory itself belongs to the backend."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._references: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: the free ones and those that only the prefix cache keeps."""
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        return len(self._references)

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache keeps."""
        return len(self._evictable)

    def allocate(self, count: int) -> list[int] | None:
        """That many pages, each with one reference, or None without taking any."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if not self._free:
                self._evict_one()
            page = self._free.pop()
            self._references[page] = 1
            pages.append(page)
        return pages

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The longest known chain of pages, each with one more reference."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._references[page] = self._references.get(page, 0) + 1
            self._evictable.pop(page, None)
            pages.append(page)
        return pages

    def known(self, digest: bytes) -> bool:
        """Whether `match` would find it."""
        return digest in self._page_of

    def register(self, page: int, digest: bytes) -> None:
        """Tells the prefix cache what a full, computed page holds. A page that another already stands for stays private."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Gives one reference of each page back. Later pages of a chain are evicted before earlier ones."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._digest_of:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Empties the prefix cache; pages that sequences hold stay theirs."""
        while self._evictable:
            self._evict_one()
        self._page_of.clear()
        self._digest_of.clear()

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless every page is accounted for exactly once; `holders` are the pages of each sequence."""
        held = Counter(page for pages in holders for page in pages)
        if dict(held) != self._references:
            raise RuntimeError(f"reference counts {self._references} are not what sequences hold: {dict(held)}")
        groups = [set(self._free), set(self._references), set(self._evictable)]
        if sum(map(len, groups)) != self.total or set().union(*groups) != set(range(self.total)) or len(self._free) != len(groups[0]):
            raise RuntimeError(f"pages are lost or in two places: free {self._free}, held {groups[1]}, cached {groups[2]}")
        if {page: digest for digest, page in self._page_of.items()} != self._digest_of or groups[2] - set(self._digest_of):
            raise RuntimeError("the prefix cache's two maps disagree")
        if groups[0] & set(self._digest_of):
            raise RuntimeError("the prefix cache stands for a free page")

    def _evict_one(self) -> None:
        page, _ = self._evictable.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        self._free.append(page)
