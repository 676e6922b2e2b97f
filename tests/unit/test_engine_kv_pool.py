"""The page pool against random programs: no page lost, none given twice, and the prefix cache only forgets what nobody holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decodefleet_agent.engine.kv_pool import KVPool, page_digest, pages_for

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """Holders take fresh pages or share known chains; the model remembers which digest each page was registered with."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(TOTAL)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.next_digest = 0

    @rule(count=st.integers(0, TOTAL + 1))
    def allocate(self, count: int) -> None:
        held = {page for pages in self.holders for page in pages}
        before = self.pool.available
        pages = self.pool.allocate(count)
        if count > before:
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == count and not held & set(pages)
        for page in pages:
            self.content.pop(page, None)
        self.holders.append(pages)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.holders if pages]))
        page = data.draw(st.sampled_from(pages))
        if page not in self.content:
            self.next_digest += 1
            self.content[page] = page_digest(b"", [self.next_digest])
            self.pool.register(page, self.content[page])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.content)))
        assert self.pool.match([self.content[page], page_digest(b"unknown", [])]) == [page]
        self.holders.append([page])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)
        held = {page for pages in self.holders for page in pages}
        assert self.pool.used == len(held)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.cached == 0
        self.content.clear()

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity(self.holders)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() -> None:
    pool = KVPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old and new
    digests = [page_digest(b"", [n]) for n in range(4)]
    for page, digest in zip([*old, *new], digests, strict=True):
        pool.register(page, digest)
    pool.release(old)
    pool.release(new)
    assert pool.available == 4 and pool.cached == 4
    assert pool.allocate(1) == [old[1]]
    assert pool.match(digests[:2]) == [old[0]]
    assert pool.match(digests[2:]) == new


def test_a_second_page_with_the_same_content_stays_private() -> None:
    pool = KVPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first and second
    digest = page_digest(b"", [1])
    pool.register(first[0], digest)
    pool.register(second[0], digest)
    pool.release(second)
    assert pool.cached == 0 and pool.available == 1
    pool.check_integrity([first])


def test_integrity_check_sees_a_page_that_two_hold_with_one_reference() -> None:
    pool = KVPool(2)
    pages = pool.allocate(1)
    assert pages
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check_integrity([pages, pages])


def test_a_digest_depends_on_all_tokens_before() -> None:
    assert page_digest(page_digest(b"", [1]), [2]) != page_digest(page_digest(b"", [3]), [2])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages
