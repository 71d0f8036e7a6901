"""A small engine with its surroundings: time, durability on command, and short ways to say things."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xkv_gateway.core.engine import Engine
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import (
    BeginLoad,
    BeginStore,
    Delete,
    EngineLimits,
    LeaseId,
    Lookup,
    LookupMode,
    LookupOutcome,
    ReadPlan,
    StoreStatus,
    WritePlan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.core.records import Record

SECOND_NS = 1_000_000_000
SECRET = bytes(range(32))
NEVER = 2.0
"""No card is ever as full as that: nothing is evicted in the background."""

LIMITS = EngineLimits(
    capacity_au=28,
    au_bytes=1024,
    max_objects=64,
    object_bytes_max=1 << 20,
    lease_ttl_max_ns=60 * SECOND_NS,
    leases_per_scope_max=1000,
    leased_bytes_per_scope_max=1 << 40,
    eviction=EvictionRules(trigger_watermark=NEVER),
)


class Counter:
    """Entropy that is neither random nor repeats."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, count: int) -> bytes:
        self.value += 1
        return self.value.to_bytes(count, "big")


class World:
    """An engine and what a shell would remember. Every step audits."""

    def __init__(self, rules: EvictionRules | None = None, **limits: float) -> None:
        self.limits = replace(LIMITS, eviction=rules or LIMITS.eviction, **limits)  # type: ignore[arg-type]
        self.engine = Engine(self.limits, digest_secret=SECRET, entropy=Counter())
        self.now_ns = SECOND_NS
        self.records: list[Record] = []

    def begin(
        self, keys: Sequence[bytes], sizes: Sequence[int] | int = 1024, *, ns: str = "n", scope: bytes = b"s"
    ) -> list[WritePlan | StoreStatus | None]:
        sizes_bytes = [sizes] * len(keys) if isinstance(sizes, int) else list(sizes)
        outcome = self.engine.begin_store(BeginStore(ns, scope, list(keys), sizes_bytes), self.now_ns)
        self.engine.audit()
        return outcome.entries

    def plans(
        self, keys: Sequence[bytes], sizes: Sequence[int] | int = 1024, *, ns: str = "n", scope: bytes = b"s"
    ) -> list[WritePlan]:
        plans = []
        for entry in self.begin(keys, sizes, ns=ns, scope=scope):
            assert isinstance(entry, WritePlan), entry
            plans.append(entry)
        return plans

    def commit(self, plans: Sequence[WritePlan], *, durable: bool = True) -> list[StoreStatus]:
        outcome = self.engine.commit_store(plans, [7 + plan.slot for plan in plans], self.now_ns)
        if durable:
            self.persist()
        self.engine.audit()
        return outcome.statuses

    def store(
        self, keys: Sequence[bytes], sizes: Sequence[int] | int = 1024, *, ns: str = "n", scope: bytes = b"s"
    ) -> None:
        """Store, waiting for room as a shell does."""
        left, all_sizes = list(keys), [sizes] * len(keys) if isinstance(sizes, int) else list(sizes)
        while left:
            entries = self.begin(left, all_sizes, ns=ns, scope=scope)
            plans = [entry for entry in entries if isinstance(entry, WritePlan)]
            assert not any(isinstance(entry, StoreStatus) for entry in entries), entries
            assert set(self.commit(plans)) <= {StoreStatus.STORED}
            waiting = [i for i, entry in enumerate(entries) if entry is None]
            left, all_sizes = [left[i] for i in waiting], [all_sizes[i] for i in waiting]

    def lookup(
        self,
        keys: Sequence[bytes],
        lease_ttl_ns: int = 0,
        *,
        ns: str = "n",
        scope: bytes = b"s",
        each: bool = False,
    ) -> LookupOutcome:
        mode = LookupMode.EACH if each else LookupMode.PREFIX
        outcome = self.engine.lookup(Lookup(ns, scope, list(keys), mode, lease_ttl_ns), self.now_ns)
        self.engine.audit()
        return outcome

    def held(self, keys: Sequence[bytes], *, ns: str = "n", scope: bytes = b"s") -> list[bool]:
        return [size is not None for size in self.lookup(keys, ns=ns, scope=scope, each=True).sizes_bytes]

    def lease(self, keys: Sequence[bytes], ttl_ns: int = SECOND_NS) -> LeaseId:
        outcome = self.lookup(keys, ttl_ns)
        assert outcome.lease is not None
        return outcome.lease

    def load(
        self, keys: Sequence[bytes], lease: LeaseId | None = None, *, ns: str = "n", scope: bytes = b"s"
    ) -> list[ReadPlan | None]:
        plans = self.engine.begin_load(BeginLoad(ns, scope, list(keys), lease), self.now_ns)
        self.engine.audit()
        return plans

    def pinned(self, keys: Sequence[bytes], lease: LeaseId | None = None) -> list[ReadPlan]:
        plans = [plan for plan in self.load(keys, lease) if plan is not None]
        assert len(plans) == len(keys)
        return plans

    def end_load(self, plans: Sequence[ReadPlan], corrupt: Sequence[ReadPlan] = ()) -> None:
        self.engine.end_load(plans, corrupt, self.now_ns)
        self.engine.audit()

    def delete(self, keys: Sequence[bytes], *, ns: str = "n", scope: bytes = b"s") -> int:
        deleted = self.engine.delete(Delete(ns, scope, list(keys)), self.now_ns).deleted
        self.engine.audit()
        return deleted

    def persist(self) -> None:
        """All records so far become durable, and those that follow from that."""
        while records := self.engine.take_records():
            self.records += records
            self.engine.persisted(records[-1].lsn, self.now_ns)
            self.engine.audit()

    def wait(self, ns: int) -> None:
        self.now_ns += ns
        self.engine.tick(self.now_ns)
        self.engine.audit()


def keys(count: int, prefix: str = "k") -> list[bytes]:
    return [f"{prefix}{i:07}".encode() for i in range(count)]
