"""Which domains are in memory: bounded, least recently used evicted first, never one in use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_covnorm.serve.residents import Resident, Residents

LIMIT = 100


def add(residents: Residents, name: str, size: int = 10, **more: object) -> Resident:
    found = residents.add(Resident(name, "1", size, **more))  # type: ignore[arg-type]
    found.loading = False
    return found


def names(found: list[Resident] | None) -> list[str] | None:
    return None if found is None else [r.name for r in found]


def test_the_least_recently_used_are_evicted_and_no_more_than_needed():
    residents = Residents(LIMIT)
    for name in "abcd":
        add(residents, name, 25)
    residents.release(residents.hold("a"))  # now b was used least recently
    assert names(residents.room_for(1)) == ["b"]
    assert names(residents.room_for(25)) == ["b"]
    assert names(residents.room_for(26)) == ["b", "c"]
    assert names(residents.room_for(100)) == ["b", "c", "d", "a"]
    assert residents.room_for(101) is None


def test_a_domain_in_use_is_never_evicted():
    residents = Residents(LIMIT)
    add(residents, "a", 50)
    add(residents, "b", 50)
    held = residents.hold("a")
    residents.hold("a")
    residents.release(held)
    assert names(residents.room_for(50)) == ["b"]
    assert residents.room_for(51) is None
    with pytest.raises(RuntimeError, match="in use"):
        residents.drop(held)
    residents.release(held)
    assert names(residents.room_for(100)) == ["b", "a"]


def test_pinned_and_loading_domains_are_not_evicted():
    residents = Residents(LIMIT)
    add(residents, "pinned", 40, pinned=True)
    residents.add(Resident("loading", "1", 40))
    assert residents.room_for(20) == []
    assert residents.room_for(21) is None


def test_a_domain_that_can_never_fit_beside_the_pinned_is_known():
    residents = Residents(LIMIT)
    add(residents, "pinned", 40, pinned=True)
    add(residents, "other", 60)
    assert not residents.never_fits(Resident("new", "1", 60))
    assert residents.never_fits(Resident("new", "1", 61))
    assert not residents.never_fits(Resident("pinned", "2", 100))  # it replaces itself


def test_the_domain_loaded_first_ends_its_turn_first_one_at_a_time():
    residents = Residents(LIMIT)
    assert residents.next_turn_over() is None
    add(residents, "pinned", 40, pinned=True)
    a, b = add(residents, "a", uses=1), add(residents, "b", uses=1)
    add(residents, "idle")  # not a candidate: room_for would have evicted it if that helped
    a.loaded_at, b.loaded_at = 2.0, 1.0
    residents.add(Resident("loading", "1", 10))
    assert residents.next_turn_over() is b
    b.turn_over = True
    assert residents.next_turn_over() is None


def test_a_loading_domain_cannot_be_dropped_but_its_load_can_fail():
    residents = Residents(LIMIT)
    coming = residents.add(Resident("a", "1", 10))
    with pytest.raises(RuntimeError, match="in use"):
        residents.drop(coming)
    residents.hold("a")
    residents.load_failed(coming)
    assert residents.held == {}
    assert coming.uses == 0


def test_releasing_or_adding_too_often_is_an_error():
    residents = Residents(LIMIT)
    add(residents, "a")
    held = residents.hold("a")
    residents.release(held)
    with pytest.raises(RuntimeError, match="more often"):
        residents.release(held)
    with pytest.raises(RuntimeError, match="already"):
        residents.add(Resident("a", "2", 1))


def test_another_version_of_a_domain_or_its_basis_conflicts():
    residents = Residents(LIMIT)
    a = add(residents, "a", basis=("joint", "1"))
    b = add(residents, "b", basis=("joint", "1"))
    c = add(residents, "c", basis=("other", "1"))
    d = add(residents, "d")
    assert residents.conflicts(Resident("a", "1", 1, ("joint", "1"))) == [a]
    assert residents.conflicts(Resident("e", "1", 1, ("joint", "1"))) == []
    assert residents.conflicts(Resident("e", "1", 1, ("joint", "2"))) == [a, b]
    assert residents.conflicts(Resident("a", "2", 1, ("joint", "2"))) == [a, b]
    assert residents.conflicts(Resident("d", "2", 1)) == [d]
    assert residents.conflicts(Resident("c", "2", 1)) == [c]


class Memory(RuleBasedStateMachine):
    """Requests hold and release in any order, compared with a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents(LIMIT)
        self.order: list[str] = []  # least recently used first
        self.held: list[Resident] = []

    @rule(name=st.sampled_from("abcdefgh"), size=st.integers(1, 60), pinned=st.booleans())
    def load(self, name: str, size: int, pinned: bool) -> None:
        if name in self.residents.held:
            return
        victims = self.residents.room_for(size)
        free = [n for n in self.order if self._is_idle(n)]
        most = LIMIT - sum(r.bytes for n, r in self.residents.held.items() if n not in free)
        assert (victims is None) == (size > most)
        if victims is None:
            return
        assert names(victims) == free[: len(victims)]
        before = self.residents.bytes
        if victims:  # all of them are needed
            assert before - sum(v.bytes for v in victims[:-1]) + size > LIMIT
        for victim in victims:
            self.residents.drop(victim)
            self.order.remove(victim.name)
        add(self.residents, name, size, pinned=pinned)
        self.order.append(name)

    def _is_idle(self, name: str) -> bool:
        found = self.residents.held[name]
        return not found.pinned and all(h is not found for h in self.held)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        self.held.append(self.residents.hold(name))
        self.order.remove(name)
        self.order.append(name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        self.residents.release(self.held.pop(place))

    @invariant()
    def it_fits_and_what_is_in_use_is_add(self) -> None:
        assert self.residents.bytes <= LIMIT
        assert set(self.residents.held) == set(self.order)
        for resident in self.held:
            assert self.residents.held[resident.name] is resident
        assert sum(r.uses for r in self.residents.held.values()) == len(self.held)


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
