"""Reservations of the card's namespace: registrants, the holder, and who may do what (Base 8.19). Pure.

Nothing persists through the end of the card (PTPL is off). A host is known by its identifier, whichever of its associations asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xkv_nvmeof.blockdev import Registrant, ReservationStatus, ReservationType
from xkv_nvmeof.reservation import (
    IGNORE_KEY,
    REGISTRANTS_MAX,
    AcquireAction,
    Persistence,
    RegisterAction,
    ReleaseAction,
)
from xkv_nvmeof.spec import IoOpcode, Status

WRITING: Final = frozenset(
    {
        IoOpcode.WRITE,
        IoOpcode.WRITE_ZEROES,
        IoOpcode.DATASET_MANAGEMENT,
        IoOpcode.FLUSH,
    }
)
"""Commands of the Write group (Base Figure 577); Read is the only other one that a reservation can keep out."""
_ALL_REGISTRANTS: Final = frozenset(
    {
        ReservationType.WRITE_EXCLUSIVE_ALL_REGISTRANTS,
        ReservationType.EXCLUSIVE_ACCESS_ALL_REGISTRANTS,
    }
)
_EXCLUSIVE_ACCESS: Final = frozenset(
    {
        ReservationType.EXCLUSIVE_ACCESS,
        ReservationType.EXCLUSIVE_ACCESS_REGISTRANTS_ONLY,
        ReservationType.EXCLUSIVE_ACCESS_ALL_REGISTRANTS,
    }
)
_HOLDER_ONLY: Final = frozenset({ReservationType.WRITE_EXCLUSIVE, ReservationType.EXCLUSIVE_ACCESS})
_ACTION: Final = 7
NOBODY: Final[frozenset[bytes]] = frozenset()


@dataclass(frozen=True, slots=True)
class Acquired:
    """Outcome of an Acquire: `abort` are the hosts whose commands must be over before it completes."""

    status: Status
    abort: frozenset[bytes] = NOBODY


class ReservationTable:
    """The registrations and the reservation of one namespace. Host identifiers are 16 bytes, keys numbers of 64 bits."""

    def __init__(self) -> None:
        self._keys: dict[bytes, int] = {}
        self._kind: ReservationType | None = None
        self._holder: bytes | None = None
        """None although there is a `_kind`: all registrants hold it."""
        self._generation = 0

    # ---- who may do what -------------------------------------------------------------------------------------

    def conflict(self, opcode: int, host_id: bytes) -> bool:
        """Tell whether the reservation keeps this host from a read or a write (Base 8.19.1, Figure 577)."""
        kind = self._kind
        if kind is None or self._holds(host_id):
            return False
        if opcode not in WRITING and (opcode != IoOpcode.READ or kind not in _EXCLUSIVE_ACCESS):
            return False
        return kind in _HOLDER_ONLY or host_id not in self._keys

    def _holds(self, host_id: bytes) -> bool:
        if self._kind in _ALL_REGISTRANTS:
            return host_id in self._keys
        return host_id == self._holder

    def status(self) -> ReservationStatus:
        """Who is registered, and who holds."""
        registrants = tuple(
            Registrant(host_id, key, self._holds(host_id)) for host_id, key in self._keys.items()
        )
        return ReservationStatus(self._generation, self._kind, registrants)

    # ---- Register (Base 7.3, 8.19.3, 8.19.4) -------------------------------------------------------------------

    def register(self, host_id: bytes, dword_10: int, current: int, new: int) -> Status:
        """Carry out a Register."""
        persistence = dword_10 >> 30
        if persistence not in {Persistence.AS_IT_IS, Persistence.FORGOTTEN}:
            return Status.INVALID_FIELD
        ignores_key = bool(dword_10 & IGNORE_KEY)
        match dword_10 & _ACTION:
            case RegisterAction.REGISTER:
                status = self._register(host_id, new)
            case RegisterAction.UNREGISTER:
                status = self._unregister(host_id, current, ignores_key=ignores_key)
            case RegisterAction.REPLACE:
                status = self._replace(host_id, current, new, ignores_key=ignores_key)
            case _:
                return Status.INVALID_FIELD
        if status is Status.SUCCESS:
            self._count()
        return status

    def _register(self, host_id: bytes, new: int) -> Status:
        if new == 0:
            return Status.INVALID_FIELD
        if host_id not in self._keys and len(self._keys) == REGISTRANTS_MAX:
            return Status.INTERNAL_ERROR
        if self._keys.setdefault(host_id, new) != new:
            return Status.RESERVATION_CONFLICT
        return Status.SUCCESS

    def _replace(self, host_id: bytes, current: int, new: int, *, ignores_key: bool) -> Status:
        if new == 0:
            return Status.INVALID_FIELD
        if host_id not in self._keys and ignores_key:
            return self._register(host_id, new)
        if not ignores_key and self._keys.get(host_id) != current:
            return Status.RESERVATION_CONFLICT
        self._keys[host_id] = new
        return Status.SUCCESS

    def _unregister(self, host_id: bytes, current: int, *, ignores_key: bool) -> Status:
        if host_id not in self._keys or (not ignores_key and self._keys[host_id] != current):
            return Status.RESERVATION_CONFLICT
        self._remove({host_id})
        return Status.SUCCESS

    def _remove(self, host_ids: set[bytes]) -> None:
        """End registrations. A reservation ends with that of its holder, or with the last where all hold it."""
        for host_id in host_ids:
            del self._keys[host_id]
        if self._holder in host_ids or not self._keys:
            self._kind = self._holder = None

    def _count(self) -> None:
        self._generation = (self._generation + 1) & 0xFFFF_FFFF

    # ---- Acquire (Base 7.2, 8.19.5, 8.19.7) --------------------------------------------------------------------

    def acquire(self, host_id: bytes, dword_10: int, current: int, victim: int) -> Acquired:
        """Carry out an Acquire."""
        action = dword_10 & _ACTION
        try:
            kind = ReservationType(dword_10 >> 8 & 0xFF)
        except ValueError:
            return Acquired(Status.INVALID_FIELD)
        if dword_10 & IGNORE_KEY or action not in set(AcquireAction):
            return Acquired(Status.INVALID_FIELD)
        if current == 0 or self._keys.get(host_id) != current:
            return Acquired(Status.RESERVATION_CONFLICT)
        if action == AcquireAction.ACQUIRE:
            return Acquired(self._acquire(host_id, kind))
        victims = self._victims(host_id, victim)
        if victims is None:
            return Acquired(Status.RESERVATION_CONFLICT)
        if self._takes(victim):
            self._remove(victims)
            self._reserve(host_id, kind)
        else:
            self._remove(victims)
        self._count()
        # A host that ends its own registration needs nobody to tell it that its commands are over.
        aborts = action == AcquireAction.PREEMPT_AND_ABORT
        return Acquired(Status.SUCCESS, frozenset(victims - {host_id}) if aborts else NOBODY)

    def _acquire(self, host_id: bytes, kind: ReservationType) -> Status:
        if self._kind is None:
            self._reserve(host_id, kind)
        elif not self._holds(host_id) or self._kind is not kind:
            return Status.RESERVATION_CONFLICT
        return Status.SUCCESS

    def _reserve(self, host_id: bytes, kind: ReservationType) -> None:
        self._kind = kind
        self._holder = None if kind in _ALL_REGISTRANTS else host_id

    def _takes(self, victim: int) -> bool:
        """Tell whether pre-empting this key takes the reservation with it."""
        if self._kind is None:
            return False
        if self._kind in _ALL_REGISTRANTS:
            return victim == 0
        assert self._holder is not None
        return self._keys[self._holder] == victim

    def _victims(self, host_id: bytes, victim: int) -> set[bytes] | None:
        """Whose registrations end; None: there are none of that key."""
        if victim == 0:
            return set(self._keys) - {host_id} if self._kind in _ALL_REGISTRANTS else None
        found = {each for each, key in self._keys.items() if key == victim}
        if not found:
            return None
        # Who pre-empts the holder's key, perhaps its own, stays and holds.
        return found - {host_id} if self._takes(victim) else found

    # ---- Release (Base 7.4, 8.19.6, 8.19.8) --------------------------------------------------------------------

    def release(self, host_id: bytes, dword_10: int, current: int) -> Status:
        """Carry out a Release."""
        if dword_10 & IGNORE_KEY:
            return Status.INVALID_FIELD
        if current == 0 or self._keys.get(host_id) != current:
            return Status.RESERVATION_CONFLICT
        match dword_10 & _ACTION:
            case ReleaseAction.RELEASE:
                if self._kind is None or not self._holds(host_id):
                    return Status.SUCCESS  # nothing to give back is no error
                if dword_10 >> 8 & 0xFF != self._kind:
                    return Status.INVALID_FIELD
                self._kind = self._holder = None
            case ReleaseAction.CLEAR:
                self._remove(set(self._keys))
                self._count()
            case _:
                return Status.INVALID_FIELD
        return Status.SUCCESS
