"""The administration of a card in a few dicts: what the admin port is given by the daemon."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from tests.service.fake_status import FakeSource
from xkv_gateway.card.administration import (
    BadTenant,
    NameTaken,
    TooManyTenants,
    Verification,
    WipeProgress,
    WipeStage,
)
from xkv_gateway.core.counters import Counters
from xkv_gateway.core.tenancy import (
    EvictionRules,
    Held,
    NamespaceInfo,
    Page,
    ScopeInfo,
    TenantCounters,
    TenantInfo,
)
from xkv_gateway.core.types import Usage
from xkv_gateway.service.meter import Meter
from xkv_gateway.service.metrics import AdminSources

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
TENANTS_MAX = 20_000


@dataclass
class FakeWipe:
    """A wipe that stays where the test puts it."""

    progress: WipeProgress
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ends_at_once: bool = False

    async def durable(self) -> None:
        self.progress = replace(self.progress, stage=WipeStage.DURABLE)
        if self.ends_at_once:
            self.end()

    async def run(self) -> WipeProgress:
        await self.ended.wait()
        return self.progress

    def end(self, stage: WipeStage = WipeStage.DONE) -> None:
        progress = self.progress
        self.progress = replace(
            progress,
            stage=stage,
            erased_bytes=progress.left_bytes,
            left_bytes=0,
            waiting_bytes=0,
            verification=Verification.DEALLOCATED,
            ended_ns=progress.began_ns + 2_500_000_000,
        )
        self.ended.set()


@dataclass
class FakeCard:
    """Objects are (namespace, scope) -> (objects, bytes); `refusal` is raised by every change."""

    limits: dict[bytes, int] = field(default_factory=dict)
    names: dict[bytes, str] = field(default_factory=dict)
    held: dict[tuple[str, bytes], Held] = field(default_factory=dict)
    ttls: dict[str, tuple[int, int]] = field(default_factory=dict)
    refusal: Exception | None = None
    wipes_end_at_once: bool = True
    tenants_known: bool = True
    rules: EvictionRules = field(default_factory=EvictionRules)
    au_bytes: int = 65536
    begun: list[FakeWipe] = field(default_factory=list)
    whole: Counters = field(default_factory=Counters)
    counted: dict[bytes, TenantCounters] = field(default_factory=dict)
    counted_max: int = 20_000
    former: TenantCounters = field(default_factory=TenantCounters)

    def usage(self) -> Usage:
        return Usage(10, 1, 1, 5, 1, 1, 7, 3, 2)

    def counters(self) -> Counters:
        return self.whole

    def counters_of_former(self) -> TenantCounters:
        return self.former

    def tenant(self, scope: bytes) -> TenantInfo:
        held = [each for (_, owner), each in self.held.items() if owner == scope]
        summed = Held(sum(h.objects for h in held), sum(h.charged_bytes for h in held))
        named = scope in self.names
        limit = self.limits.get(scope)
        if named and len(self.counted) < self.counted_max:
            self.counted.setdefault(scope, TenantCounters())
        counters = self.counted.get(scope) if named else None
        return TenantInfo(scope, self.names.get(scope), limit, limit, summed, 0, 0, counters)

    def tenant_named(self, name: str) -> TenantInfo | None:
        return next((self.tenant(scope) for scope, own in self.names.items() if own == name), None)

    def tenants(self, cursor: int = 0, count: int = 1000) -> Page[TenantInfo]:
        registered = list(self.limits | dict.fromkeys(self.names, 0))
        return self._page(
            [self.tenant(scope) for scope in registered[cursor : cursor + count]], registered, cursor
        )

    @staticmethod
    def _page(items: list[T], everything: Sequence[object], cursor: int) -> Page[T]:
        ends = cursor + len(items)
        return Page(items, len(everything), ends if ends < len(everything) else None)

    def usage_of_unnamed(self) -> tuple[int, int]:
        unnamed = [held for (_, scope), held in self.held.items() if scope not in self.names]
        return sum(h.objects for h in unnamed), sum(h.charged_bytes for h in unnamed)

    def _change(self, scope: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        if scope not in self.limits | self.names and len(self.limits | self.names) >= TENANTS_MAX:
            raise TooManyTenants("no room for more")

    async def set_limit(self, scope: bytes, limit_bytes: int) -> TenantInfo:
        self._change(scope)
        self.limits[scope] = limit_bytes
        return self.tenant(scope)

    async def clear_limit(self, scope: bytes) -> bool:
        self._change(scope)
        return self.limits.pop(scope, None) is not None

    async def set_tenant(self, name: str, scope: bytes, limit_bytes: int | None) -> TenantInfo:
        self._change(scope)
        if name == "refused by the card":
            raise BadTenant("not that one", "name")
        if any(own == name and owner != scope for owner, own in self.names.items()):
            raise NameTaken("another tenant has that name")
        self.names[scope] = name
        self.limits.pop(scope, None)
        if limit_bytes is not None:
            self.limits[scope] = limit_bytes
        return self.tenant(scope)

    async def remove_tenant(self, name: str) -> bool:
        self._change(b"")
        for scope, own in self.names.items():
            if own == name:
                del self.names[scope]
                self.limits.pop(scope, None)
                return True
        return False

    async def confirm_tenants(self) -> None:
        self._change(b"")
        self.tenants_known = True

    def namespaces(self, cursor: int = 0, count: int = 1000) -> Page[NamespaceInfo]:
        names = list(dict.fromkeys(name for name, _ in self.held))
        found = [self.namespace(name) for name in names[cursor : cursor + count]]
        return self._page([info for info in found if info is not None], names, cursor)

    def namespace(self, name: str) -> NamespaceInfo | None:
        held = [each for (own, _), each in self.held.items() if own == name]
        if not held:
            return None
        summed = Held(sum(h.objects for h in held), sum(h.charged_bytes for h in held))
        return NamespaceInfo(name, summed, len(held), *self.ttls.get(name, (0, 0)))

    async def set_ttl(self, namespace: str, idle_s: int | None, total_s: int | None) -> NamespaceInfo:
        self._change(b"")
        old = self.ttls.get(namespace, (0, 0))
        wishes = zip((idle_s, total_s), old, strict=True)
        self.ttls[namespace] = idle, total = tuple(o if wish is None else wish for wish, o in wishes)  # type: ignore[misc]
        return self.namespace(namespace) or NamespaceInfo(namespace, Held(), 0, idle, total)

    def scopes_of(self, namespace: str, cursor: int = 0, count: int = 1000) -> Page[ScopeInfo]:
        scopes = [(scope, held) for (own, scope), held in self.held.items() if own == namespace]
        infos = [ScopeInfo(s, self.names.get(s), h, 0) for s, h in scopes[cursor : cursor + count]]
        return self._page(infos, scopes, cursor)

    def wipe(self, namespace: str, scope: bytes | None) -> FakeWipe:
        self._change(b"")
        gone = [(n, s) for n, s in self.held if n == namespace and scope in {None, s}]
        held = [self.held.pop(home) for home in gone]
        objects = sum(h.objects for h in held)
        charged = sum(h.charged_bytes for h in held)
        progress = WipeProgress(
            100 + len(self.begun), namespace, scope, WipeStage.BEGUN, objects, charged, 0, charged, 0,
            Verification.NOTHING, False, 0, None,
        )  # fmt: skip
        wipe = FakeWipe(progress, ends_at_once=self.wipes_end_at_once)
        self.begun.append(wipe)
        return wipe

    def wipes(self) -> list[WipeProgress]:
        return [wipe.progress for wipe in self.begun]


def fake_sources(source: FakeSource | None = None, card: FakeCard | None = None) -> AdminSources:
    card = card or FakeCard()
    meter = Meter(card.names.get)
    return AdminSources(source or FakeSource(), meter, card, lambda: 5_000_000_000)
