"""The ledger of sequences and cells: whatever happens to it, it adds up."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from uma_trio.kv.ledger import Ledger, LedgerStatistics


class Bookkeeping(RuleBasedStateMachine):
    """A ledger beside the plainest model of one: a dict of what each sequence holds."""

    held = Bundle("held")

    @initialize(n=st.integers(1, 8), cells=st.integers(1, 200), most=st.integers(1, 300))
    def start(self, n: int, cells: int, most: int) -> None:
        self.n, self.cells, self.most = n, cells, min(cells, most)
        self.ledger = Ledger(n_sequences=n, n_cells=cells, cells_per_sequence=most)
        self.model: dict[int, list[int]] = {}

    @rule(target=held, cells=st.integers(1, 300))
    def reserve(self, cells: int) -> object:
        assert self.ledger.largest == self.most
        if cells > self.most:
            with pytest.raises(ValueError, match=str(cells)):
                self.ledger.reserve(cells)
            return multiple()
        seq_id = self.ledger.reserve(cells)
        free = sorted(set(range(self.n)) - set(self.model))
        fits = sum(reserved for reserved, _ in self.model.values()) + cells <= self.cells
        assert seq_id == (free[0] if free and fits else None)
        if seq_id is None:
            return multiple()
        self.model[seq_id] = [cells, 0]
        return seq_id

    @rule(seq_id=held, share=st.floats(0, 1))
    def use(self, seq_id: int, share: float) -> None:
        reserved, used = self.model[seq_id]
        more = int(share * (reserved - used))
        self.ledger.use(seq_id, more)
        self.model[seq_id][1] += more

    @rule(seq_id=held)
    def forget(self, seq_id: int) -> None:
        self.ledger.forget(seq_id)
        self.model[seq_id][1] = 0

    @rule(seq_id=consumes(held))
    def release(self, seq_id: int) -> None:
        self.ledger.release(seq_id)
        del self.model[seq_id]
        with pytest.raises(KeyError):
            self.ledger.release(seq_id)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check_integrity()
            assert self.ledger.statistics() == LedgerStatistics(
                sequences=len(self.model),
                cells_reserved=sum(reserved for reserved, _ in self.model.values()),
                cells_used=sum(used for _, used in self.model.values()),
                cells=self.cells,
            )


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def ledger() -> Ledger:
    return Ledger(n_sequences=2, n_cells=100, cells_per_sequence=60)


def test_a_sequence_comes_only_with_all_its_room() -> None:
    books = ledger()
    assert books.reserve(60) == 0
    assert books.reserve(41) is None
    assert books.reserve(40) == 1
    books.release(0)
    assert books.reserve(60) == 0


@pytest.mark.parametrize("cells", [0, -1, 61])
def test_what_can_never_be_is_told_apart_from_what_must_wait(cells: int) -> None:
    with pytest.raises(ValueError, match="1 to 60"):
        ledger().reserve(cells)


def test_more_than_reserved_is_a_defect() -> None:
    books = ledger()
    books.reserve(10)
    books.use(0, 10)
    with pytest.raises(AssertionError, match="11 of 10"):
        books.use(0, 1)


def test_a_sequence_that_nobody_holds() -> None:
    for call in (lambda: ledger().use(0, 1), lambda: ledger().forget(0), lambda: ledger().release(1)):
        with pytest.raises(KeyError):
            call()


def test_check_integrity_sees_a_leak() -> None:
    books = ledger()
    books.reserve(10)
    books._reserved += 1
    with pytest.raises(AssertionError):
        books.check_integrity()
