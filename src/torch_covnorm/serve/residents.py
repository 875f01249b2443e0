"""Which domains are in a worker's memory: bounded bytes, least recently used, never one in use.

Bookkeeping alone: it says what to load and what to drop, and whoever asks does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Resident:
    """One version of a domain. `uses` counts the requests that hold it or wait for its load.

    leaving: a newer version waits, or it was removed; it goes when nobody uses it any more.
    over: so does one whose turn is over because another waits for its room; no new requests.
    since: when it came, by the caller's clock.
    """

    name: str
    version: str
    bytes: int
    basis: tuple[str, str] | None = None  # its name and version
    loading: bool = True
    leaving: bool = False
    over: bool = False
    since: float = 0.0
    pinned: bool = False
    uses: int = 0
    used: int = 0

    @property
    def idle(self) -> bool:
        """Nothing needs it now."""
        return not self.uses and not self.loading


@dataclass
class Residents:
    """Of one worker. `limit` is in bytes; what is loading counts already."""

    limit: int
    held: dict[str, Resident] = field(default_factory=dict)
    _clock: int = 0

    @property
    def bytes(self) -> int:
        """Of all that is there or coming."""
        return sum(r.bytes for r in self.held.values())

    def hold(self, name: str) -> Resident:
        """Count one more request that needs a domain which is there or coming."""
        found = self.held[name]
        self._clock += 1
        found.uses, found.used = found.uses + 1, self._clock
        return found

    def release(self, resident: Resident) -> None:
        """One request less."""
        if resident.uses <= 0:
            raise RuntimeError(f"{resident.name}: released more often than held")
        resident.uses -= 1

    def conflicts(self, new: Resident) -> list[Resident]:
        """What must go before `new` can come: one of its name, another version of its basis."""
        return [
            r
            for r in self.held.values()
            if r.name == new.name
            or (new.basis and r.basis and r.basis[0] == new.basis[0] and r.basis != new.basis)
        ]

    def never_fits(self, new: Resident) -> bool:
        """Whether there is no room for it even when nothing is in use, as pinned ones stay."""
        stay = sum(r.bytes for r in self.held.values() if r.pinned and r.name != new.name)
        return stay + new.bytes > self.limit

    def room_for(self, size: int) -> list[Resident] | None:
        """What to drop so that `size` bytes fit: the least recently used; None: it cannot be."""
        over = self.bytes + size - self.limit
        chosen: list[Resident] = []
        free = [r for r in self.held.values() if r.idle and not r.pinned]
        for resident in sorted(free, key=lambda r: r.used):
            if over <= 0:
                break
            chosen.append(resident)
            over -= resident.bytes
        return chosen if over <= 0 else None

    def oldest(self) -> Resident | None:
        """Whose turn is to be over next, where all are in use; None: one is about to go."""
        used = [r for r in self.held.values() if r.uses and not r.pinned and not r.loading]
        if any(r.over or r.leaving for r in used):
            return None
        return min(used, key=lambda r: r.since, default=None)

    def add(self, resident: Resident) -> Resident:
        """It is coming."""
        if resident.name in self.held:
            raise RuntimeError(f"{resident.name}: is there already")
        self._clock += 1
        resident.used = self._clock
        self.held[resident.name] = resident
        return resident

    def drop(self, resident: Resident) -> None:
        """It goes."""
        if not resident.idle:
            raise RuntimeError(f"{resident.name}: in use by {resident.uses}, cannot go")
        del self.held[resident.name]

    def lose(self, resident: Resident) -> None:
        """It never came: its load failed, and those who wait are told."""
        resident.uses = 0
        del self.held[resident.name]
