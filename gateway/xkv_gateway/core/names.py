"""Namespaces and scopes, interned to small ids, and the *home* of an object: its (namespace, scope).

Everything that belongs to one home hangs on it (its order of use, its leases), so that a wipe or an eviction within it never
touches the others. Homes live as long as an object or a lease refers to them: a scope that was used once leaves
nothing behind. Ids are reused, lowest first; a record that names an id precedes the first object that carries it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from .recency import UseLog

if TYPE_CHECKING:
    from .leases import Lease


class Namespace:
    """An interned namespace."""

    __slots__ = ("homes", "ident", "name", "named")

    def __init__(self, ident: int, name: str) -> None:
        self.ident = ident
        self.name = name
        self.homes: dict[bytes, Home] = {}
        self.named = False
        """Whether the journal knows the id."""


class Scope:
    """An interned scope: a tenant, summed over namespaces."""

    __slots__ = ("homes", "ident", "leased_bytes", "leases", "name", "named")

    def __init__(self, ident: int, name: bytes) -> None:
        self.ident = ident
        self.name = name
        self.homes: dict[str, Home] = {}
        self.leases = 0
        self.leased_bytes = 0
        self.named = False


class Home:
    """One (namespace, scope) that holds something."""

    __slots__ = ("ident", "leases", "members", "namespace", "references", "scope", "uses")

    def __init__(self, ident: int, namespace: Namespace, scope: Scope) -> None:
        self.ident = ident
        self.namespace = namespace
        self.scope = scope
        self.references = 0
        """Slots in any state but ABSENT, and leases."""
        self.members = 0
        """Slots that are reserved, committing or live."""
        self.leases: dict[bytes, Lease] | None = None
        self.uses = UseLog()


class _Ids:
    """Small numbers, the lowest free one first."""

    __slots__ = ("_free", "_next")

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, ident: int) -> None:
        heapq.heappush(self._free, ident)

    def restore(self, taken: set[int]) -> None:
        """Begin with these taken."""
        self._next = max(taken, default=-1) + 1
        self._free = sorted(set(range(self._next)) - taken)


class Names:
    """All that is interned."""

    def __init__(self) -> None:
        self.namespaces: dict[str, Namespace] = {}
        self.scopes: dict[bytes, Scope] = {}
        self.homes: list[Home | None] = []
        self._namespace_ids = _Ids()
        self._scope_ids = _Ids()
        self._home_ids = _Ids()

    def find(self, namespace: str, scope: bytes) -> Home | None:
        """The home, if anything lives there."""
        space = self.namespaces.get(namespace)
        return None if space is None else space.homes.get(scope)

    def find_all(self, namespace: str, scope: bytes | None) -> list[Home]:
        """The homes of a namespace, or the one of a scope in it."""
        space = self.namespaces.get(namespace)
        if space is None:
            return []
        if scope is None:
            return list(space.homes.values())
        return [space.homes[scope]] if scope in space.homes else []

    def home(self, ident: int) -> Home:
        """The home of an id that is in use."""
        home = self.homes[ident]
        assert home is not None, "a home went while an object lived there"
        return home

    def intern(self, namespace: str, scope: bytes) -> Home:
        """The home, made if need be; the caller refers to it at once or calls `release` with 0."""
        home = self.find(namespace, scope)
        if home is not None:
            return home
        space = self.namespaces.get(namespace)
        if space is None:
            space = self.namespaces[namespace] = Namespace(self._namespace_ids.take(), namespace)
        tenant = self.scopes.get(scope)
        if tenant is None:
            tenant = self.scopes[scope] = Scope(self._scope_ids.take(), scope)
        home = Home(self._home_ids.take(), space, tenant)
        space.homes[scope] = tenant.homes[namespace] = home
        if home.ident == len(self.homes):
            self.homes.append(home)
        else:
            self.homes[home.ident] = home
        return home

    def restore(
        self, namespaces: dict[int, str], scopes: dict[int, bytes], pairs: list[tuple[int, int]]
    ) -> list[Home]:
        """Begin with the homes of these (namespace id, scope id), under ids that the journal knows already.

        The caller adds references to each at once.
        """
        for namespace_id, scope_id in pairs:
            name, scope_name = namespaces[namespace_id], scopes[scope_id]
            space = self.namespaces.setdefault(name, Namespace(namespace_id, name))
            tenant = self.scopes.setdefault(scope_name, Scope(scope_id, scope_name))
            assert (space.ident, tenant.ident) == (namespace_id, scope_id), "two ids of one name"
            space.named = tenant.named = True
            home = Home(self._home_ids.take(), space, tenant)
            space.homes[scope_name] = tenant.homes[name] = home
            self.homes.append(home)
        self._namespace_ids.restore({space.ident for space in self.namespaces.values()})
        self._scope_ids.restore({tenant.ident for tenant in self.scopes.values()})
        return [home for home in self.homes if home is not None]

    def release(self, home: Home, references: int) -> None:
        """Drop references; the last one takes the home, and perhaps its namespace and scope, along."""
        home.references -= references
        assert home.references >= 0, "references to a home"
        if home.references:
            return
        assert home.members == 0, "a home with members and without references"
        self.homes[home.ident] = None
        self._home_ids.give_back(home.ident)
        space, tenant = home.namespace, home.scope
        del space.homes[tenant.name], tenant.homes[space.name]
        if not space.homes:
            del self.namespaces[space.name]
            self._namespace_ids.give_back(space.ident)
        if not tenant.homes:
            assert tenant.leases == 0, "leases of a scope without homes"
            del self.scopes[tenant.name]
            self._scope_ids.give_back(tenant.ident)
