"""Which domains are in a worker's memory: bounded bytes, least recently used evicted first.

Bookkeeping only. It decides what to load and what to drop; the caller does both.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False)
class Resident:
    """One version of a domain in a worker's memory."""

    name: str
    version: str
    bytes: int
    basis: tuple[str, str] | None = None  # name and version of its shared basis
    loading: bool = True
    load: asyncio.Task[None] = field(init=False)  # set by the caller
    outdated: bool = False  # replaced or removed in the store: dropped once nobody uses it
    turn_over: bool = False  # another domain needs its room: no new requests, evicted when idle
    loaded_at: float = 0.0  # by the caller's clock
    pinned: bool = False
    uses: int = 0  # requests that hold it or wait for its load

    @property
    def idle(self) -> bool:
        """Whether no request needs it and it is not loading."""
        return not self.uses and not self.loading


@dataclass
class Residents:
    """The domains in one worker's memory, `limit` bytes in total. Those loading count already."""

    limit: int
    held: dict[str, Resident] = field(default_factory=dict)  # least recently used first

    @property
    def bytes(self) -> int:
        """Bytes in total."""
        return sum(r.bytes for r in self.held.values())

    def hold(self, name: str) -> Resident:
        """Count one more request that needs a domain, and return the domain."""
        resident = self.held[name] = self.held.pop(name)
        resident.uses += 1
        return resident

    def release(self, resident: Resident) -> None:
        """Count one request less."""
        if resident.uses <= 0:
            raise RuntimeError(f"{resident.name}: released more often than held")
        resident.uses -= 1

    def conflicts(self, new: Resident) -> list[Resident]:
        """Return what must go before `new`: the same name, or another version of its basis."""
        return [
            r
            for r in self.held.values()
            if r.name == new.name
            or (new.basis and r.basis and r.basis[0] == new.basis[0] and r.basis != new.basis)
        ]

    def never_fits(self, new: Resident) -> bool:
        """Return whether there is no room even if only the pinned domains stay."""
        pinned = sum(r.bytes for r in self.held.values() if r.pinned and r.name != new.name)
        return pinned + new.bytes > self.limit

    def room_for(self, size: int) -> list[Resident] | None:
        """Return what to evict so that `size` bytes fit, or None if that is not possible now."""
        over = self.bytes + size - self.limit
        victims: list[Resident] = []
        for resident in self.held.values():
            if over > 0 and resident.idle and not resident.pinned:
                victims.append(resident)
                over -= resident.bytes
        return victims if over <= 0 else None

    def next_turn_over(self) -> Resident | None:
        """Return the domain to replace next if all are in use; None if one is leaving already."""
        used = [r for r in self.held.values() if r.uses and not r.pinned and not r.loading]
        if any(r.turn_over or r.outdated for r in used):
            return None
        return min(used, key=lambda r: r.loaded_at, default=None)

    def add(self, resident: Resident) -> Resident:
        """Add a domain whose load begins."""
        if resident.name in self.held:
            raise RuntimeError(f"{resident.name}: already in memory")
        self.held[resident.name] = resident
        return resident

    def drop(self, resident: Resident) -> None:
        """Remove an idle domain."""
        if not resident.idle:
            raise RuntimeError(f"{resident.name}: in use by {resident.uses} requests, not dropped")
        del self.held[resident.name]

    def load_failed(self, resident: Resident) -> None:
        """Remove a domain whose load failed. Its requests get the error from the load."""
        resident.uses = 0
        del self.held[resident.name]
