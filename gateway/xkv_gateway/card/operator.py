"""Implements `administration.Administration` on a running card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_gateway.card.administration import BadTenant, NameTaken, TooManyTenants
from xkv_gateway.card.store import CardOffline, CardRecovering, JournalFull
from xkv_gateway.card.tables import LABEL_BYTES_MAX, NAMESPACE_BYTES_MAX, SCOPE_BYTES_MAX
from xkv_gateway.core.lifetimes import RULES_MAX
from xkv_gateway.core.tenancy import LIMIT_BYTES_MAX, TTL_S_MAX, Held, NamespaceInfo

if TYPE_CHECKING:
    from xkv_gateway.card.administration import WipeProgress
    from xkv_gateway.card.keeping import Keeper
    from xkv_gateway.card.session import CardSession
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.card.wipe import WipeJob
    from xkv_gateway.core.counters import Counters
    from xkv_gateway.core.engine import Engine
    from xkv_gateway.core.tenancy import EvictionRules, Page, ScopeInfo, TenantCounters, TenantInfo
    from xkv_gateway.core.types import Usage

PAGE: Final = 1000


class Tenants:
    """Registered tenants of a running card.

    Args:
        session: the run.
        store: the card store that serves it.
    """

    def __init__(self, session: CardSession, store: CardStore) -> None:
        self._session = session
        self._store = store

    @property
    def _engine(self) -> Engine:
        return self._store.engine

    @property
    def known(self) -> bool:
        """See `Administration.tenants_known`."""
        return self._engine.quotas.known

    def tenant(self, scope: bytes) -> TenantInfo:
        """See `Administration`."""
        return self._engine.inspection.tenant(scope)

    def tenant_named(self, name: str) -> TenantInfo | None:
        """See `Administration`."""
        scope = self._engine.quotas.scope_by_name.get(name)
        return None if scope is None else self.tenant(scope)

    def tenants(self, cursor: int = 0, count: int = PAGE) -> Page[TenantInfo]:
        """See `Administration`."""
        return self._engine.inspection.tenants(cursor, count)

    async def set_limit(self, scope: bytes, limit_bytes: int) -> TenantInfo:
        """See `Administration`."""
        _check(scope, limit_bytes)
        await self._make_room(scope)
        row = self._engine.quotas.by_scope.get(scope)
        return await self._set(scope, limit_bytes, None if row is None else row.name)

    async def clear_limit(self, scope: bytes) -> bool:
        """See `Administration`."""
        self._require_writable()
        row = self._engine.quotas.by_scope.get(scope)
        if row is None or row.limit_bytes is None:
            return False
        await self._set(scope, None, row.name)
        return True

    async def set_tenant(self, name: str, scope: bytes, limit_bytes: int | None) -> TenantInfo:
        """See `Administration`."""
        _check(scope, limit_bytes)
        _check_name(name)
        await self._make_room(scope)
        if self._engine.quotas.scope_by_name.get(name, scope) != scope:
            raise NameTaken("another tenant has that name")
        return await self._set(scope, limit_bytes, name)

    async def remove_tenant(self, name: str) -> bool:
        """See `Administration`."""
        self._require_writable()
        scope = self._engine.quotas.scope_by_name.get(name)
        if scope is None:
            return False
        await self._set(scope, None, None)
        return True

    async def confirm(self) -> None:
        """See `Administration.confirm_tenants`."""
        self._require_writable()
        if not self.known:
            self._engine.quotas.set_known(known=True)
            self._store.changed()
            await self._saved()

    async def _make_room(self, scope: bytes) -> None:
        self._require_writable()
        if scope not in self._engine.quotas.by_scope:
            await self._keeper.register.room()
            self._require_writable()

    async def _set(self, scope: bytes, limit_bytes: int | None, name: str | None) -> TenantInfo:
        self._engine.quotas.set(scope, limit_bytes, name)
        self._store.changed()
        # Also where nothing changes: somebody else's change to the same may be on its way.
        await self._saved()
        return self.tenant(scope)

    async def _saved(self) -> None:
        keeper = self._keeper
        if not await keeper.until_ended(keeper.register.saved()):
            raise CardOffline

    @property
    def _keeper(self) -> Keeper:
        if self._session.keeper is None:
            raise CardRecovering
        return self._session.keeper

    def _require_writable(self) -> None:
        self._store.require_writable()
        if self._store.pressed:
            raise JournalFull


class Operator(Tenants):
    """Everything that an operator may see and change."""

    @property
    def rules(self) -> EvictionRules:
        """See `Administration`."""
        return self._engine.inspection.rules

    @property
    def tenants_known(self) -> bool:
        """See `Administration`."""
        return self.known

    @property
    def au_bytes(self) -> int:
        """See `Administration`."""
        return self._engine.inspection.au_bytes

    def usage(self) -> Usage:
        """See `Administration`."""
        return self._engine.usage()

    def counters(self) -> Counters:
        """See `Administration`."""
        return self._engine.counters

    def counters_of_former(self) -> TenantCounters:
        """See `Administration`."""
        return self._engine.inspection.former()

    def usage_of_unnamed(self) -> tuple[int, int]:
        """See `Administration`."""
        held = self._engine.inspection.unnamed()
        return held.objects, held.charged_bytes

    async def confirm_tenants(self) -> None:
        """See `Administration`."""
        await self.confirm()

    def namespaces(self, cursor: int = 0, count: int = PAGE) -> Page[NamespaceInfo]:
        """See `Administration`."""
        return self._engine.inspection.namespaces(cursor, count)

    def namespace(self, name: str) -> NamespaceInfo | None:
        """See `Administration`."""
        return self._engine.inspection.namespace(name)

    def scopes_of(self, namespace: str, cursor: int = 0, count: int = PAGE) -> Page[ScopeInfo]:
        """See `Administration`."""
        return self._engine.inspection.scopes_of(namespace, cursor, count)

    async def set_ttl(self, namespace: str, idle_s: int | None, total_s: int | None) -> NamespaceInfo:
        """See `Administration`."""
        _check_namespace(namespace)
        for limit_s, field in ((idle_s, "ttl_idle_s"), (total_s, "ttl_total_s")):
            if limit_s is not None and not 0 <= limit_s <= TTL_S_MAX:
                raise BadTenant(f"a lifetime is 0 to {TTL_S_MAX} s", field)
        self._require_writable()
        lifetimes = self._engine.lifetimes
        if namespace not in lifetimes.rules:
            if len(lifetimes.rules) >= RULES_MAX:
                raise TooManyTenants(f"{RULES_MAX} namespaces have a rule already")
            await self._keeper.register.room()
            self._require_writable()
        before = lifetimes.rules.get(namespace)
        old = (0, 0) if before is None else (before.idle_s, before.total_s)
        lifetimes.set(namespace, old[0] if idle_s is None else idle_s, old[1] if total_s is None else total_s)
        self._store.changed()
        await self._saved()
        return self.namespace(namespace) or NamespaceInfo(namespace, Held(), 0)

    def wipe(self, namespace: str, scope: bytes | None) -> WipeJob:
        """See `Administration`."""
        _check_namespace(namespace)
        _check(scope or b"", None)
        self._require_writable()
        return self._keeper.wiper.begin(namespace, scope)

    def wipes(self) -> list[WipeProgress]:
        """See `Administration`."""
        keeper = self._session.keeper
        return [] if keeper is None else [job.progress for job in keeper.wiper.jobs.values()]


def _check_namespace(namespace: str) -> None:
    if len(namespace.encode()) > NAMESPACE_BYTES_MAX:
        raise BadTenant(f"a namespace has at most {NAMESPACE_BYTES_MAX} bytes", "namespace")


def _check(scope: bytes, limit_bytes: int | None) -> None:
    if len(scope) > SCOPE_BYTES_MAX:
        raise BadTenant(f"a scope has at most {SCOPE_BYTES_MAX} bytes", "scope")
    if limit_bytes is not None and not 0 <= limit_bytes <= LIMIT_BYTES_MAX:
        raise BadTenant(f"a limit is 0 to {LIMIT_BYTES_MAX} bytes", "limit_bytes")


def _check_name(name: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise BadTenant("a name is valid Unicode", "name") from error
    if not 1 <= size <= LABEL_BYTES_MAX or not name.isprintable() or name != name.strip():
        raise BadTenant(
            f"a name has 1 to {LABEL_BYTES_MAX} bytes of printable text, without space at its ends", "name"
        )
    if "/" in name or name.startswith("scope:") or name in {"_default", "other", ".", ".."}:
        raise BadTenant("this name means something else (it has a `/`, or is reserved)", "name")
