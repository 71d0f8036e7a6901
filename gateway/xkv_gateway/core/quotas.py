"""Registered tenants: limits and names by scope, what holds for everybody else, and what is still unknown.

A limit holds from the moment it is set. One that is taken away goes on holding until the next cycle. While it is unknown whether
the table is complete (damage took rows away), having no quota is no reason to lose anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .records import TenantRecord, TenantsKnownRecord
from .tenancy import COUNTED_TENANTS_MAX, EvictionPolicy, TenantCounters, TenantRow
from .types import NO_LSN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .names import Names, Scope
    from .records import RecordLog
    from .tenancy import EvictionRules
    from .types import EngineLimits, Lsn


class Tenant:
    """A registered tenant."""

    __slots__ = ("limit_bytes", "lsn", "name", "scope")

    def __init__(self, scope: bytes, limit_bytes: int | None, name: str | None, lsn: Lsn) -> None:
        self.scope = scope
        self.limit_bytes = limit_bytes
        self.name = name
        self.lsn = lsn

    def row(self) -> TenantRow:
        """As it is kept on the card."""
        return TenantRow(self.scope, self.limit_bytes, self.name, self.lsn)


class Quotas:
    """The table of tenants of one engine.

    Args:
        names: scopes in use, whose limits follow the table.
        limits: of the engine; the rules of eviction are in there.
        log: where changes are recorded.
    """

    def __init__(self, names: Names, limits: EngineLimits, log: RecordLog) -> None:
        self.known = True
        """Whether the table is certainly complete."""
        self.known_lsn = NO_LSN
        self.by_scope: dict[bytes, Tenant] = {}
        self.scope_by_name: dict[str, bytes] = {}
        self.counters: dict[bytes, TenantCounters] = {}
        """By scope, for named tenants only, at most COUNTED_TENANTS_MAX."""
        self.former = TenantCounters()
        """What was counted under names that are gone: neither any tenant's, nor that of those who never had a name."""
        self.leaving: dict[bytes, int] = {}
        """Limits that were taken away and hold until the next cycle."""
        self.removed: dict[bytes, TenantRow] = {}
        """Rows that were taken away; kept until no checkpoint can bring them back (`forget_removed`)."""
        self.changed: set[Scope] = set()
        """Scopes whose limit changed: the next cycle looks at them."""
        self.on_limit: Callable[[Scope], None] | None = None
        """Told of each scope in use whose limit may have changed."""
        self._names = names
        self._au_bytes = limits.au_bytes
        self._rules = limits.eviction
        self._log = log
        names.on_new_scope = self._attach

    # --- what holds -----------------------------------------------------------------------------------------

    def limit_bytes_of(self, scope: bytes) -> int | None:
        """The limit of a scope that holds now; None: unlimited."""
        if self._rules.policy is EvictionPolicy.NOOP:
            return None
        tenant = self.by_scope.get(scope)
        if tenant is not None and tenant.limit_bytes is not None:
            return tenant.limit_bytes
        if self.leaving and scope in self.leaving:
            return self.leaving[scope]
        if self._rules.policy is EvictionPolicy.LRU or not self.known:
            return None
        return self._rules.unregistered_limit_bytes

    def limit_au_of(self, scope: bytes) -> int | None:
        """As `limit_bytes_of`, in whole units: a part of a unit holds nothing."""
        limit_bytes = self.limit_bytes_of(scope)
        return None if limit_bytes is None else limit_bytes // self._au_bytes

    def _attach(self, scope: Scope) -> None:
        scope.limit_au = self.limit_au_of(scope.name)

    def _reattach(self, name: bytes) -> None:
        scope = self._names.scopes.get(name)
        if scope is not None:
            self._attach(scope)
            self.changed.add(scope)
            if self.on_limit is not None:
                self.on_limit(scope)

    def _reattach_all(self) -> None:
        for name in self._names.scopes:
            self._reattach(name)

    def set_rules(self, rules: EvictionRules) -> None:
        """From now on these hold."""
        self._rules = rules
        self._reattach_all()

    # --- changes --------------------------------------------------------------------------------------------

    def set(self, scope: bytes, limit_bytes: int | None, name: str | None) -> Lsn:
        """Register a tenant, change it, or (neither limit nor name) take it out. The caller checked that the name is free.

        Returns:
            The LSN of the record, or NO_LSN where nothing changes.
        """
        before = self.by_scope.get(scope)
        old = (None, None) if before is None else (before.limit_bytes, before.name)
        if old == (limit_bytes, name):
            return NO_LSN
        assert name is None or self.scope_by_name.get(name, scope) == scope, "a name that is taken"
        lsn = self._log.add(TenantRecord(self._log.next_lsn(), scope, limit_bytes, name))
        if limit_bytes is None and old[0] is not None:
            self.leaving[scope] = old[0]
        self._enter(TenantRow(scope, limit_bytes, name, lsn))
        self._reattach(scope)
        return lsn

    def set_known(self, *, known: bool) -> Lsn:
        """Note whether the table is complete."""
        lsn = self._log.add(TenantsKnownRecord(self._log.next_lsn(), known))
        self.known, self.known_lsn = known, lsn
        self._reattach_all()
        return lsn

    def record_again(self) -> Lsn:
        """Record everything anew: the journal may lack some of it."""
        lsn = self._log.add(TenantsKnownRecord(self._log.next_lsn(), self.known))
        self.known_lsn = lsn
        for row in [*self.removed.values(), *(tenant.row() for tenant in self.by_scope.values())]:
            lsn = self._log.add(TenantRecord(self._log.next_lsn(), row.scope, row.limit_bytes, row.name))
            self._enter(TenantRow(row.scope, row.limit_bytes, row.name, lsn))
        return lsn

    def restore(self, rows: Iterable[TenantRow], *, known: bool, known_lsn: Lsn) -> None:
        """Begin with what a card held."""
        self.known, self.known_lsn = known, known_lsn
        for row in rows:
            self._enter(row)
        self._reattach_all()

    def cycle(self) -> None:
        """A cycle begins: limits that were taken away do not hold any more."""
        if self.leaving:
            left, self.leaving = list(self.leaving), {}
            for scope in left:
                self._reattach(scope)

    def rows(self) -> list[TenantRow]:
        """All registered tenants, as they are kept on the card."""
        return [tenant.row() for tenant in self.by_scope.values()]

    def forget_removed(self, before_lsn: int) -> None:
        """Nothing that is ever replayed begins before this LSN."""
        self.removed = {scope: row for scope, row in self.removed.items() if row.lsn >= before_lsn}

    def _enter(self, row: TenantRow) -> None:
        scope, name = row.scope, row.name
        before = self.by_scope.get(scope)
        if before is not None and before.name is not None and before.name != name:
            del self.scope_by_name[before.name]
            self.former.add(self.counters.pop(scope, TenantCounters()))
        if name is not None:
            self.scope_by_name[name] = scope
            if scope not in self.counters and len(self.counters) < COUNTED_TENANTS_MAX:
                self.counters[scope] = TenantCounters()
        if row.limit_bytes is None and name is None:
            self.by_scope.pop(scope, None)
            self.removed[scope] = row
            return
        self.removed.pop(scope, None)
        if row.limit_bytes is not None:
            self.leaving.pop(scope, None)
        if before is None:
            self.by_scope[scope] = Tenant(scope, row.limit_bytes, name, row.lsn)
        else:
            before.limit_bytes, before.name, before.lsn = row.limit_bytes, name, row.lsn
