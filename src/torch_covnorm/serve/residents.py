"""Which domains are in a worker's memory: bounded bytes, least recently used, never one in use.

Bookkeeping alone: it says what to load and what to drop, and whoever asks does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """Of a domain on its way through memory."""

    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"  # a newer version waits, or it was removed: no new requests


@dataclass
class Resident:
    """One version of a domain. `uses` counts the requests that hold it."""

    name: str
    version: str
    bytes: int
    basis: tuple[str, str] | None = None  # its name and version
    state: State = State.LOADING
    uses: int = 0
    pinned: bool = False
    used: int = 0


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
        """Count one more request that needs a domain which is there."""
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
        """What must go before `new` can come: another version of it or of its basis."""
        return [
            r
            for r in self.held.values()
            if (r.name == new.name and r.version != new.version)
            or (new.basis and r.basis and r.basis[0] == new.basis[0] and r.basis != new.basis)
        ]

    def room_for(self, size: int) -> list[Resident] | None:
        """What to drop so that `size` bytes fit: the least recently used; None: it cannot be."""
        over = self.bytes + size - self.limit
        chosen: list[Resident] = []
        idle = [r for r in self.held.values() if not r.uses and not r.pinned]
        idle = [r for r in idle if r.state is not State.LOADING]
        for resident in sorted(idle, key=lambda r: r.used):
            if over <= 0:
                break
            chosen.append(resident)
            over -= resident.bytes
        return chosen if over <= 0 else None

    def add(self, resident: Resident) -> Resident:
        """It is coming."""
        if resident.name in self.held:
            raise RuntimeError(f"{resident.name}: is there already")
        self._clock += 1
        resident.used = self._clock
        self.held[resident.name] = resident
        return resident

    def drop(self, resident: Resident) -> None:
        """It is gone."""
        if resident.uses:
            raise RuntimeError(f"{resident.name}: in use by {resident.uses}, cannot go")
        del self.held[resident.name]
