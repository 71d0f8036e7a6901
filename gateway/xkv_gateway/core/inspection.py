"""Who holds what, for operators: namespaces, the scopes in them, tenants. Cheap, and a page at a time."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Final, TypeVar

from .accounts import CHARGED
from .lifecycle import LIVE
from .tenancy import Held, NamespaceInfo, Page, ScopeInfo, TenantInfo, TtlRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .names import Home, Namespace
    from .quotas import Tenant
    from .state import EngineState
    from .tenancy import EvictionRules, TenantCounters

PAGE_MAX: Final = 1000

_From = TypeVar("_From")
_To = TypeVar("_To")


class Inspection:
    """Reads the totals of one engine."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.au_bytes = state.limits.au_bytes

    @property
    def rules(self) -> EvictionRules:
        """The rules of eviction that hold now."""
        return self._state.rules

    def tenant(self, scope: bytes) -> TenantInfo:
        """One tenant, also if it is neither registered nor holds anything."""
        state, quotas = self._state, self._state.quotas
        row, used = quotas.by_scope.get(scope), state.names.scopes.get(scope)
        limit_bytes = quotas.limit_bytes_of(scope)
        return TenantInfo(
            scope=scope,
            name=None if row is None else row.name,
            limit_bytes=None if row is None else row.limit_bytes,
            effective_limit_bytes=limit_bytes,
            held=Held() if used is None else self._held(used.live_objects, used.charged_au),
            leased_bytes=0 if used is None else used.leased_bytes,
            leases=0 if used is None else used.leases,
            counters=quotas.counters.get(scope),
        )

    def tenants(self, cursor: int, count: int) -> Page[TenantInfo]:
        """Registered tenants in the order of their registration."""
        rows = self._state.quotas.by_scope

        def info(row: Tenant) -> TenantInfo:
            return self.tenant(row.scope)

        return _page(rows.values(), len(rows), info, cursor, count)

    def unnamed(self) -> Held:
        """All scopes without a name together."""
        state, names = self._state, self._state.names
        named = [names.scopes.get(scope) for scope in state.quotas.scope_by_name.values()]
        objects = sum(scope.live_objects for scope in named if scope is not None)
        charged = sum(scope.charged_au for scope in named if scope is not None)
        table = state.slots
        all_au = sum(table.units_in[each] for each in CHARGED)
        return self._held(table.objects_in[LIVE] - objects, all_au - charged)

    def former(self) -> TenantCounters:
        """What was counted under names that are gone."""
        return self._state.quotas.former

    def namespace(self, name: str) -> NamespaceInfo | None:
        """One namespace; None: nothing is held there, and it has no rule."""
        space, rule = self._state.names.namespaces.get(name), self._state.lifetimes.rules.get(name)
        if space is not None:
            return self._space(space)
        return None if rule is None else self._empty(rule)

    def namespaces(self, cursor: int, count: int) -> Page[NamespaceInfo]:
        """Namespaces that hold something, then those that only have a rule."""
        spaces = self._state.names.namespaces
        empty = [rule for name, rule in self._state.lifetimes.rules.items() if name not in spaces]
        both: Iterable[Namespace | TtlRow] = chain(spaces.values(), empty)
        return _page(both, len(spaces) + len(empty), self._any_space, cursor, count)

    def scopes_of(self, namespace: str, cursor: int, count: int) -> Page[ScopeInfo]:
        """Scopes within a namespace."""
        space = self._state.names.namespaces.get(namespace)
        homes = {} if space is None else space.homes
        return _page(homes.values(), len(homes), self._home, cursor, count)

    def _any_space(self, space: Namespace | TtlRow) -> NamespaceInfo:
        return self._empty(space) if isinstance(space, TtlRow) else self._space(space)

    def _space(self, space: Namespace) -> NamespaceInfo:
        rule = self._state.lifetimes.rules.get(space.name)
        limits = (0, 0) if rule is None else (rule.idle_s, rule.total_s)
        held = self._held(space.live_objects, space.charged_au)
        return NamespaceInfo(space.name, held, len(space.homes), *limits)

    @staticmethod
    def _empty(rule: TtlRow) -> NamespaceInfo:
        return NamespaceInfo(rule.namespace, Held(), 0, rule.idle_s, rule.total_s)

    def _home(self, home: Home) -> ScopeInfo:
        row = self._state.quotas.by_scope.get(home.scope.name)
        return ScopeInfo(
            home.scope.name,
            None if row is None else row.name,
            self._held(home.live_objects, home.charged_au),
            len(home.leases or {}),
        )

    def _held(self, objects: int, charged_au: int) -> Held:
        return Held(objects, charged_au * self.au_bytes)


def _page(
    things: Iterable[_From], total: int, info: Callable[[_From], _To], cursor: int, count: int
) -> Page[_To]:
    """One page: `cursor` is a place in the order in which things came into being."""
    first = max(0, cursor)
    last = first + max(1, min(count, PAGE_MAX))
    return Page([info(each) for each in islice(things, first, last)], total, last if last < total else None)
