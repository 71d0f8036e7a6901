"""The engine against a plain dict, step by step, with durability that lags as it likes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from xkv_gateway.core.errors import UnknownLease, UnknownTicket
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import BeginStore, LeaseId, ReadPlan, StoreStatus, WritePlan

from .helpers import SECOND_NS, World

if TYPE_CHECKING:
    from xkv_gateway.core.tickets import Ticket

GRACE_NS = 3 * SECOND_NS
Name = tuple[str, bytes, bytes]
NAMES = st.tuples(st.sampled_from(["", "a"]), st.sampled_from([b"", b"t"]))
KEYS = st.lists(
    st.sampled_from([b"a", b"b", b"c", b"dd", b"ee", b"f" * 40]), min_size=1, max_size=4, unique=True
)


@dataclass
class Entry:
    """What the model knows of one object."""

    name: Name
    plan: WritePlan
    checksum: int = 0
    lsn: int | None = None
    live: bool = False
    cancelled: bool = False
    ends_ns: int | None = None
    """When the ticket ends that it was handed out with."""


@dataclass
class ModelTicket:
    """What a client holds: until `until_ns` its writes may land on the units of the entries."""

    ticket: Ticket
    entries: list[Entry]
    deadline_ns: int

    @property
    def until_ns(self) -> int:
        return self.deadline_ns + GRACE_NS


@dataclass
class ModelLease:
    entries: dict[Name, Entry]
    deadline_ns: int
    wiped: bool = False


@dataclass
class Model:
    current: dict[Name, Entry] = field(default_factory=dict)
    leases: dict[LeaseId, ModelLease] = field(default_factory=dict)
    covered: dict[int, tuple[ReadPlan, Entry]] = field(default_factory=dict)
    out: list[tuple[int, Entry]] = field(default_factory=list)
    """Until when late writes may land on an entry's units."""

    def valid(self, ident: LeaseId, now_ns: int) -> ModelLease | None:
        lease = self.leases.get(ident)
        return lease if lease is not None and lease.deadline_ns > now_ns else None


class EngineMachine(RuleBasedStateMachine):
    writes: Bundle[Any] = Bundle("writes")
    loads: Bundle[Any] = Bundle("loads")
    leases: Bundle[Any] = Bundle("leases")
    tickets: Bundle[Any] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            capacity_au=12,
            max_objects=16,
            direct_grace_ns=GRACE_NS,
            rules=EvictionRules(trigger_watermark=0.8, eviction_ratio=0.25),
        )
        self.model = Model()
        self.lsn_deletes = 0

    # --- stores -------------------------------------------------------------------------------------------

    @rule(target=writes, where=NAMES, keys=KEYS, size=st.sampled_from([0, 1, 1024, 1025, 5000, 20000]))
    def begin_store(self, where: tuple[str, bytes], keys: list[bytes], size: int) -> Any:
        entries = self.world.begin(keys, size, ns=where[0], scope=where[1])
        made = []
        for key, entry in zip(keys, entries, strict=True):
            known = self._current((*where, key))
            if known is not None:
                assert entry is (StoreStatus.EXISTS if known.live else StoreStatus.IN_PROGRESS)
            elif size > 12 * 1024:
                assert entry is StoreStatus.TOO_LARGE
            elif isinstance(entry, WritePlan):
                made.append(Entry((*where, key), entry))
                self.model.current[*where, key] = made[-1]
            else:
                assert entry in {None, StoreStatus.NO_SPACE}
        return multiple(*made)

    @rule(entry=consumes(writes))
    def commit(self, entry: Entry) -> None:
        statuses = self.world.commit([entry.plan], durable=False)
        if entry.cancelled:
            assert statuses == [StoreStatus.CANCELLED]
        else:
            assert statuses == [StoreStatus.STORED]
            entry.lsn, entry.checksum = self.world.engine.last_lsn, 7 + entry.plan.slot
        assert self.world.commit([entry.plan], durable=False) == [StoreStatus.CANCELLED]

    @rule(entry=consumes(writes), settles=st.sampled_from([None, 1, 3]))
    def abort(self, entry: Entry, settles: int | None) -> None:
        at = None if settles is None else self.world.now_ns + settles * SECOND_NS
        for _ in range(2):
            self.world.engine.abort_store([entry.plan], self.world.now_ns, at)
        if not entry.cancelled:
            del self.model.current[entry.name]

    # --- tickets ------------------------------------------------------------------------------------------

    @rule(target=tickets, entry=consumes(writes), ttl=st.sampled_from([1, 4]))
    def hand_out(self, entry: Entry, ttl: int) -> Any:
        plan, engine = entry.plan, self.world.engine
        request = BeginStore(entry.name[0], entry.name[1], [entry.name[2]], [plan.size_bytes])
        good, ticket, lsn = engine.tickets.grant(request, [plan], self.world.now_ns)
        assert good == [not entry.cancelled]
        if ticket is None:
            return multiple()
        assert lsn == engine.last_lsn
        engine.tickets.begin(ticket, ttl * SECOND_NS, self.world.now_ns)
        made = ModelTicket(ticket, [entry], self.world.now_ns + ttl * SECOND_NS)
        self.model.out.append((made.until_ns, entry))
        entry.ends_ns = made.deadline_ns
        return made

    def _over(self, ticket: ModelTicket) -> bool:
        """Whether its time is over; then its keys are nobody's as soon as the engine notices."""
        if ticket.deadline_ns > self.world.now_ns:
            return False
        with pytest.raises(UnknownTicket):
            self.world.engine.tickets.find(ticket.ticket.ident, self.world.now_ns)
        return True

    @rule(ticket=consumes(tickets))
    def commit_ticket(self, ticket: ModelTicket) -> None:
        engine, (entry,) = self.world.engine, ticket.entries
        if self._over(ticket):
            return
        assert engine.tickets.find(ticket.ticket.ident, self.world.now_ns) is ticket.ticket
        engine.tickets.close(ticket.ticket)
        statuses = self.world.commit([entry.plan], durable=False)
        assert statuses == [StoreStatus.CANCELLED if entry.cancelled else StoreStatus.STORED]
        engine.tickets.done(ticket.ticket, statuses)
        self.model.out.remove((ticket.until_ns, entry))
        if not entry.cancelled:
            entry.lsn, entry.checksum = engine.last_lsn, 7 + entry.plan.slot

    @rule(ticket=consumes(tickets), settled=st.booleans())
    def abort_ticket(self, ticket: ModelTicket, settled: bool) -> None:
        (entry,) = ticket.entries
        if self._over(ticket):
            return
        self.world.engine.tickets.abort(ticket.ticket, self.world.now_ns, settled=settled)
        self.model.out.remove((ticket.until_ns, entry))
        if not settled:
            self.model.out.append((self.world.now_ns + GRACE_NS, entry))
        if not entry.cancelled:
            del self.model.current[entry.name]

    # --- removal ------------------------------------------------------------------------------------------

    @rule(where=NAMES, keys=KEYS)
    def delete(self, where: tuple[str, bytes], keys: list[bytes]) -> None:
        expected = 0
        for key in keys:
            entry = self._current((*where, key))
            if entry is not None:
                expected += entry.lsn is not None
                entry.cancelled = entry.lsn is None
                del self.model.current[entry.name]
        assert self.world.delete(keys, ns=where[0], scope=where[1]) == expected

    @rule(namespace=st.sampled_from(["", "a"]), scope=st.sampled_from([None, b"", b"t"]))
    def wipe(self, namespace: str, scope: bytes | None) -> None:
        def inside(name: Name) -> bool:
            return name[0] == namespace and (scope is None or name[1] == scope)

        self._forget_evicted()
        gone = [entry for name, entry in self.model.current.items() if inside(name)]
        for entry in gone:
            entry.cancelled = entry.lsn is None
            del self.model.current[entry.name]
        for lease in self.model.leases.values():
            lease.wiped |= any(inside(name) for name in lease.entries)
        outcome = self.world.engine.wipe(namespace, scope, self.world.now_ns)
        assert outcome.objects == sum(entry.lsn is not None for entry in gone)

    # --- reading ------------------------------------------------------------------------------------------

    @rule(target=leases, where=NAMES, keys=KEYS, ttl=st.sampled_from([0, 1, 5]), each=st.booleans())
    def lookup(self, where: tuple[str, bytes], keys: list[bytes], ttl: int, each: bool) -> Any:
        hits: dict[Name, Entry] = {}
        sizes: list[int | None] = []
        for key in keys:
            entry = self._current((*where, key))
            if entry is not None and entry.live:
                hits[entry.name] = entry
                sizes.append(entry.plan.size_bytes)
            elif each:
                sizes.append(None)
            else:
                break
        outcome = self.world.lookup(keys, ttl * SECOND_NS, ns=where[0], scope=where[1], each=each)
        assert (outcome.hits, outcome.sizes_bytes) == (len(hits), sizes)
        assert (outcome.lease is not None) == bool(hits and ttl)
        if outcome.lease is None:
            return multiple()
        self.model.leases[outcome.lease] = ModelLease(hits, self.world.now_ns + ttl * SECOND_NS)
        return outcome.lease

    @rule(target=loads, where=NAMES, keys=KEYS)
    def load(self, where: tuple[str, bytes], keys: list[bytes]) -> Any:
        expected = [self._current((*where, key)) for key in keys]
        plans = self.world.load(keys, ns=where[0], scope=where[1])
        return self._check_load(plans, [entry if entry and entry.live else None for entry in expected])

    @rule(target=loads, where=NAMES, keys=KEYS, lease=leases)
    def leased_load(self, where: tuple[str, bytes], keys: list[bytes], lease: LeaseId) -> Any:
        known = self.model.valid(lease, self.world.now_ns)
        entries = known.entries if known and not known.wiped else {}
        plans = self.world.load(keys, lease, ns=where[0], scope=where[1])
        return self._check_load(plans, [entries.get((*where, key)) for key in keys])

    @rule(load=consumes(loads), corrupt=st.integers(0, 3))
    def end_load(self, load: list[tuple[ReadPlan, Entry]], corrupt: int) -> None:
        bad = load[:1] if corrupt == 0 else []
        for _, entry in bad:
            if self._current(entry.name) is entry:
                del self.model.current[entry.name]
        self.world.end_load([plan for plan, _ in load], [plan for plan, _ in bad])
        for plan, _ in load:
            del self.model.covered[id(plan)]

    @rule(lease=leases, ttl=st.sampled_from([1, 5]))
    def renew(self, lease: LeaseId, ttl: int) -> None:
        known = self.model.valid(lease, self.world.now_ns)
        entries = [] if known is None or known.wiped else list(known.entries.values())
        if known is not None and entries and all(self._current(entry.name) is entry for entry in entries):
            assert self.world.engine.renew(lease, ttl * SECOND_NS, self.world.now_ns) == ttl * SECOND_NS
            known.deadline_ns = self.world.now_ns + ttl * SECOND_NS
        else:
            with pytest.raises(UnknownLease):
                self.world.engine.renew(lease, ttl * SECOND_NS, self.world.now_ns)

    @rule(lease=leases)
    def release(self, lease: LeaseId) -> None:
        if self.model.valid(lease, self.world.now_ns) is None:
            with pytest.raises(UnknownLease):
                self.world.engine.release(lease, self.world.now_ns)
        else:
            self.world.engine.release(lease, self.world.now_ns)
            del self.model.leases[lease]

    # --- durability and time ------------------------------------------------------------------------------

    @rule(share=st.floats(0, 1))
    def persist(self, share: float) -> None:
        engine = self.world.engine
        engine.take_records()
        done = engine._state.log.persisted_lsn
        lsn = type(done)(done + int((engine.last_lsn - done) * share + 0.5))
        self._forget_evicted()
        engine.persisted(lsn, self.world.now_ns)
        for entry in self.model.current.values():
            entry.live = entry.lsn is not None and entry.lsn <= lsn

    @rule(seconds=st.integers(0, 3), tick=st.booleans())
    def pass_time(self, seconds: int, tick: bool) -> None:
        self.world.now_ns += seconds * SECOND_NS
        if tick:
            self.world.engine.tick(self.world.now_ns)

    # --- what always holds --------------------------------------------------------------------------------

    @invariant()
    def where_late_writes_may_land_nobody_else_is(self) -> None:
        table, engine = self.world.engine._state.slots, self.world.engine
        self.model.out = [each for each in self.model.out if each[0] > self.world.now_ns]
        for _, entry in self.model.out:
            assert table.generation[entry.plan.slot] == entry.plan.generation
            for extent in entry.plan.extents:
                assert engine._state.allocator.taken()[
                    extent.start_au : extent.start_au + extent.count_au
                ].all()

    @invariant()
    def audits(self) -> None:
        self.world.engine.audit()
        deadline = self.world.engine.next_deadline()
        assert deadline is None or deadline >= 0

    @invariant()
    def what_is_read_or_promised_stays_where_it_is(self) -> None:
        table = self.world.engine._state.slots
        owners = [entry for _, entry in self.model.covered.values()]
        for ident in self.model.leases:
            lease = self.model.valid(ident, self.world.now_ns)
            owners += lease.entries.values() if lease else []
        for entry in owners:
            assert table.generation[entry.plan.slot] == entry.plan.generation
            assert not any(
                self.world.engine._state.allocator._free[e.start_au : e.start_au + e.count_au].any()
                for e in entry.plan.extents
            )

    def _check_load(self, plans: list[ReadPlan | None], expected: list[Entry | None]) -> Any:
        load = []
        for plan, entry in zip(plans, expected, strict=True):
            assert (plan is None) == (entry is None)
            if plan is not None and entry is not None:
                assert plan == (*entry.plan[:3], entry.checksum, entry.plan.extents)
                load.append((plan, entry))
                self.model.covered[id(plan)] = load[-1]
        return load or multiple()

    def _current(self, name: Name) -> Entry | None:
        self._forget_evicted()
        return self.model.current.get(name)

    def _forget_evicted(self) -> None:
        """Eviction may take what is live and has no guard, whenever it likes; nothing else goes by itself."""
        table = self.world.engine._state.slots
        for name, entry in list(self.model.current.items()):
            slot = entry.plan.slot
            if table.generation[slot] == entry.plan.generation and table.state[slot] in {1, 2, 3}:
                continue
            if entry.lsn is None and entry.ends_ns is not None and entry.ends_ns <= self.world.now_ns:
                del self.model.current[name]
                continue
            assert entry.live, "only what is live may be evicted"
            guarded = [e for _, e in self.model.covered.values()]
            for ident in self.model.leases:
                lease = self.model.valid(ident, self.world.now_ns)
                guarded += lease.entries.values() if lease else []
            assert entry not in guarded, "evicted under a guard"
            del self.model.current[name]


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, derandomize=True, deadline=None, phases=(Phase.generate,)
)
TestEngine = EngineMachine.TestCase
