"""The product with one rule switched off at a time: the simulation must find each. If it does not, it cannot fail.

A mutation replaces a part of a run by a subclass, or a name in a module while the run lasts; nothing in the product knows of it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from tests.sim.gateway import Parts
from tests.sim.journal import SimJournal
from xkv_gateway.card.load import Load, Loaded
from xkv_gateway.core.digest import Digester
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.lifecycle import State
from xkv_gateway.core.removal import Removal
from xkv_gateway.core.types import NO_LSN, BeginLoad, LoadStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xkv_gateway.card.transfer import Placed
    from xkv_gateway.core.arrays import U64
    from xkv_gateway.core.records import Record
    from xkv_gateway.core.types import (
        CommitOutcome,
        Delete,
        DeleteOutcome,
        EngineLimits,
        Lookup,
        LookupOutcome,
        Lsn,
        ReadPlan,
        WipeOutcome,
        WritePlan,
    )
    from xkv_nvmeof.blockdev import DeviceError


class ShowsBeforeDurable(Engine):
    """R2: an object is visible as soon as it is committed."""

    def commit_store(
        self, plans: Sequence[WritePlan], checksums: Sequence[int], now_ns: int
    ) -> CommitOutcome:
        outcome = super().commit_store(plans, checksums, now_ns)
        self._stores.persisted(self.last_lsn)
        return outcome


class FreesBeforeTombstone(Engine):
    """R3: units are free before their tombstone is durable."""

    def take_records(self) -> list[Record]:
        self._removal.persisted(self.last_lsn)
        return super().take_records()


class NoQuarantine(Engine):
    """R4: the units of a failed write are free at once, whatever may still land on them."""

    def abort_store(self, plans: Sequence[WritePlan], now_ns: int, settles_at_ns: int | None) -> None:
        super().abort_store(plans, now_ns, None)


class NoPins(Engine):
    """R3: an I/O in flight does not hold what it reads."""

    def begin_load(self, request: BeginLoad, now_ns: int) -> list[ReadPlan | None]:
        plans = super().begin_load(request, now_ns)
        super().end_load([plan for plan in plans if plan is not None], [], now_ns)
        return plans

    def end_load(self, plans: Sequence[ReadPlan], corrupt: Sequence[ReadPlan], now_ns: int) -> Lsn:
        return NO_LSN


class NoLeases(Engine):
    """A lease is granted and holds nothing."""

    def lookup(self, request: Lookup, now_ns: int) -> LookupOutcome:
        outcome = super().lookup(request, now_ns)
        if outcome.lease is not None:
            self.release(outcome.lease, now_ns)
        return outcome


class LeaseOfKeys(Engine):
    """R7: a leased load gets whatever the key holds now, not the generation of the lease."""

    def begin_load(self, request: BeginLoad, now_ns: int) -> list[ReadPlan | None]:
        return super().begin_load(replace(request, lease=None), now_ns)


class AcknowledgesStoreEarly(Engine):
    """`stored` is answered before the record is durable."""

    def commit_store(
        self, plans: Sequence[WritePlan], checksums: Sequence[int], now_ns: int
    ) -> CommitOutcome:
        return replace(super().commit_store(plans, checksums, now_ns), lsn=NO_LSN)


class AcknowledgesDeleteEarly(Engine):
    """A delete is answered before its record is durable."""

    def delete(self, request: Delete, now_ns: int) -> DeleteOutcome:
        return replace(super().delete(request, now_ns), lsn=NO_LSN)


class WipeSparesLeases(Engine):
    """A lease outlives the wipe of its objects."""

    def wipe(self, namespace: str, scope: bytes | None, now_ns: int, *, erase: bool = False) -> WipeOutcome:
        outcome = super().wipe(namespace, scope, now_ns, erase=erase)
        for lease in self._state.leases.by_id.values():
            lease.home = _Spared(lease.home)  # type: ignore[assignment]
        return outcome


class _Spared:
    """A home that does not know that it was wiped."""

    condemned = False

    def __init__(self, home: object) -> None:
        self._home = home

    def __getattr__(self, name: str) -> object:
        return getattr(self._home, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_home":
            object.__setattr__(self, name, value)
        else:
            setattr(self._home, name, value)


class _ScopelessDigester(Digester):
    def digest(self, namespace: str, scope: bytes, keys: Sequence[bytes]) -> tuple[U64, U64]:
        return super().digest(namespace, b"", keys)


class MixesScopes(Engine):
    """R1: the scope does not count in the identity."""

    def __init__(self, *args: Any, digest_secret: bytes, **options: Any) -> None:
        super().__init__(*args, digest_secret=digest_secret, **options)
        self._state.digester = _ScopelessDigester(digest_secret)


class _FreesCancelled(Removal):
    def cancel(self, slots: Any) -> None:
        super().cancel(slots)
        if len(slots):
            super().abandon(slots, None)


class FreesUnderWriter(Engine):
    """The space of a store that was cancelled is free while its writer still writes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._removal.__class__ = _FreesCancelled


class EvictsUnderWaiting(Engine):
    """R8: eviction passes over the guards: it takes leased and pinned objects' units as they come."""

    def tick(self, now_ns: int) -> None:
        super().tick(now_ns)
        removal, table = self._removal, self._state.slots
        doomed = (table.state == State.DOOMED) & table.tombstoned & (table.pins > 0)
        if doomed.any():
            slots = doomed.nonzero()[0].astype("uint32")
            removal._free(slots)


class NoGrace(Engine):
    """R4: what a ticket held is free when its time is over, whatever its client still writes."""

    def __init__(self, limits: EngineLimits, **options: Any) -> None:
        super().__init__(limits, **options)
        self.tickets._limits = replace(limits, direct_grace_ns=0)


class RecordsBeforeData(SimJournal):
    """R2: the record is written without a flush, so that it may survive and its data not."""

    flushes = False


FORGETS_OUTAGES: Final = (
    ("tests.sim.device.SimDevice.incarnation", property(lambda _device: 0, lambda _device, _value: None)),
)
"""A flush counts for all writes before it, also where the target has lost them in between."""


class TrustingLoad(Load):
    """R6: whatever arrives is handed out."""

    async def _verify(
        self, placed: Sequence[Placed], failures: dict[int, DeviceError], results: list[Loaded]
    ) -> list[Placed]:
        await super()._verify(placed, failures, results)
        for index, _, _ in placed:
            if index not in failures:
                results[index].status = LoadStatus.OK
        return []


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule switched off. `seed` is where it is looked for first."""

    name: str
    parts: Parts
    seed: int = 0
    replaces: tuple[tuple[str, object], ...] = ()

    @contextlib.contextmanager
    def applied(self) -> Iterator[Parts]:
        """The parts to run with, while the context lasts."""
        with contextlib.ExitStack() as stack:
            for target, value in self.replaces:
                stack.enter_context(mock.patch(target, value, create=True))
            yield self.parts


MUTATIONS: Final = (
    Mutation("shows before durable", Parts(engine=ShowsBeforeDurable), seed=4),
    Mutation("frees before the tombstone is durable", Parts(engine=FreesBeforeTombstone), seed=2),
    Mutation("no quarantine", Parts(engine=NoQuarantine), seed=10),
    Mutation(
        "checksum not verified", Parts(), replaces=(("xkv_gateway.service.control.Load", TrustingLoad),)
    ),
    Mutation("no pins", Parts(engine=NoPins), seed=51),
    Mutation("frees under a reader", Parts(engine=EvictsUnderWaiting), seed=38),
    Mutation("leases hold nothing", Parts(engine=NoLeases), seed=4),
    Mutation("lease of keys, not of generations", Parts(engine=LeaseOfKeys), seed=4),
    Mutation("acknowledges stores early", Parts(engine=AcknowledgesStoreEarly)),
    Mutation("acknowledges deletes early", Parts(engine=AcknowledgesDeleteEarly), seed=2),
    Mutation("a wipe spares leases", Parts(engine=WipeSparesLeases), seed=31),
    Mutation("mixes scopes", Parts(engine=MixesScopes)),
    Mutation("frees under a writer", Parts(engine=FreesUnderWriter), seed=10),
    Mutation("forgets outages", Parts(), seed=3, replaces=FORGETS_OUTAGES),
    Mutation("no grace for late clients", Parts(engine=NoGrace)),
    Mutation("records before data", Parts(journal=RecordsBeforeData), seed=1),
)
