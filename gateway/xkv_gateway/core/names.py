"""Namespaces and scopes, interned to small ids, and the *home* of an object: its (namespace, scope).

What a scope holds is counted on it, summed over namespaces, and so is its order of use; leases hang on the home. All of them live
as long as an object or a lease refers to them: a scope that was used once leaves nothing behind. Ids are reused, lowest
first; a record that names an id precedes the first object that carries it.

A wipe *condemns* homes: they are taken out of the dicts in one step, so that whatever is stored from then on gets a new
home, and what is still in an old one is known by that.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

import numpy as np

from .recency import UseLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from .arrays import U32
    from .leases import Lease


HOMES_MIN: Final = 64


class Namespace:
    """An interned namespace."""

    __slots__ = ("charged_au", "epoch", "homes", "ident", "live_objects", "name", "named", "refs", "wipes")

    def __init__(self, ident: int, name: str) -> None:
        self.ident = ident
        self.name = name
        self.homes: dict[bytes, Home] = {}
        self.refs = 0
        """Homes, condemned ones included."""
        self.named = False
        """Whether the journal knows the id."""
        self.epoch = 0
        """How often all of it was wiped; homes of an earlier epoch are condemned."""
        self.wipes: dict[int, int] | None = None
        """Epoch to the id of the wipe that ended it."""
        self.charged_au = 0
        self.live_objects = 0


class Scope:
    """An interned scope: a tenant, summed over namespaces."""

    __slots__ = (
        "charged_au",
        "guarded_live_au",
        "guarded_live_objects",
        "held_au",
        "ident",
        "leased_bytes",
        "leases",
        "limit_au",
        "listed",
        "live_au",
        "live_objects",
        "members",
        "name",
        "named",
        "pending_au",
        "promised_au",
        "refs",
        "uses",
    )

    def __init__(self, ident: int, name: bytes) -> None:
        self.ident = ident
        self.name = name
        self.refs = 0
        """Homes, condemned ones included."""
        self.named = False
        self.leases = 0
        self.leased_bytes = 0
        self.uses = UseLog()
        self.members = 0
        """Slots that are reserved, committing or live."""
        self.limit_au: int | None = None
        """The quota that holds now; None: unlimited."""
        self.listed: float | None = None
        """Fullness under which it is listed for eviction (`fairness`); None: not listed."""
        self.charged_au = 0
        """Usage: reserved, committing, live and doomed."""
        self.held_au = 0
        """... without what is doomed."""
        self.live_au = 0
        self.live_objects = 0
        self.guarded_live_au = 0
        self.guarded_live_objects = 0
        """Live, and leased or pinned."""
        self.pending_au = 0
        """Doomed, and waiting for nothing but the tombstone."""
        self.promised_au = 0
        """... of which so much was evicted for stores that wait."""


class Home:
    """One (namespace, scope) that holds something."""

    __slots__ = (
        "charged_au",
        "epoch",
        "ident",
        "leases",
        "live_objects",
        "namespace",
        "references",
        "scope",
        "wipe",
    )

    def __init__(self, ident: int, namespace: Namespace, scope: Scope) -> None:
        self.ident = ident
        self.namespace = namespace
        self.scope = scope
        self.epoch = namespace.epoch
        self.references = 0
        """Slots in any state but ABSENT, and leases."""
        self.leases: dict[bytes, Lease] | None = None
        self.charged_au = 0
        self.live_objects = 0
        self.wipe: int | None = None
        """Id of the wipe that condemned it alone."""

    @property
    def condemned(self) -> bool:
        """Whether it was wiped: nothing in it is visible any more."""
        return self.wipe is not None or self.epoch != self.namespace.epoch

    @property
    def wiped_by(self) -> int:
        """Id of the wipe that condemned it."""
        if self.wipe is not None:
            return self.wipe
        assert self.namespace.wipes is not None, "a home that was not condemned"
        return self.namespace.wipes[self.epoch]


class _Ids:
    """Small numbers, the lowest free one first."""

    __slots__ = ("_free", "_next")

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    @property
    def end(self) -> int:
        """Above every number that is taken."""
        return self._next

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
        self.space_of_home: U32 = np.zeros(HOMES_MIN, np.uint32)
        """By home: the id of its namespace; means nothing for a home that is gone."""
        self.on_new_scope: Callable[[Scope], None] = lambda scope: None  # noqa: ARG005
        """Told of each scope that comes into use: its quota is looked up."""
        self._scope_by_ident: dict[int, Scope] = {}
        self._namespace_ids = _Ids()
        self._scope_ids = _Ids()
        self._home_ids = _Ids()

    @property
    def namespaces_end(self) -> int:
        """Above every id of a namespace."""
        return self._namespace_ids.end

    def find(self, namespace: str, scope: bytes) -> Home | None:
        """The home, if anything lives there."""
        space = self.namespaces.get(namespace)
        return None if space is None else space.homes.get(scope)

    def home(self, ident: int) -> Home:
        """The home of an id that is in use."""
        home = self.homes[ident]
        assert home is not None, "a home went while an object lived there"
        return home

    def scope_at(self, ident: int) -> Scope | None:
        """The scope of an id, if it is in use."""
        return self._scope_by_ident.get(ident)

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
            tenant = self._new_scope(self._scope_ids.take(), scope)
        return self._new_home(space, tenant)

    def _new_scope(self, ident: int, name: bytes) -> Scope:
        scope = self.scopes[name] = self._scope_by_ident[ident] = Scope(ident, name)
        self.on_new_scope(scope)
        return scope

    def _new_home(self, space: Namespace, tenant: Scope, *, listed: bool = True) -> Home:
        home = Home(self._home_ids.take(), space, tenant)
        if listed:
            space.homes[tenant.name] = home
        space.refs += 1
        tenant.refs += 1
        if home.ident == len(self.space_of_home):
            self.space_of_home = np.concatenate((self.space_of_home, np.zeros_like(self.space_of_home)))
        self.space_of_home[home.ident] = space.ident
        if home.ident == len(self.homes):
            self.homes.append(home)
        else:
            self.homes[home.ident] = home
        return home

    def restore(
        self, namespaces: dict[int, str], scopes: dict[int, bytes], homes: list[tuple[int, int, bool]]
    ) -> list[Home]:
        """Begin with the homes of these (namespace id, scope id, condemned), under ids that the journal knows already.

        Condemned are those of wipes of an earlier run (0). The caller adds references to each at once.
        """
        made: list[Home] = []
        for namespace_id, scope_id, condemned in homes:
            name, scope_name = namespaces[namespace_id], scopes[scope_id]
            space = self.namespaces.get(name)
            if space is None:
                space = self.namespaces[name] = Namespace(namespace_id, name)
            tenant = self.scopes.get(scope_name)
            if tenant is None:
                tenant = self._new_scope(scope_id, scope_name)
            assert (space.ident, tenant.ident) == (namespace_id, scope_id), "two ids of one name"
            space.named = tenant.named = True
            home = self._new_home(space, tenant, listed=not condemned)
            home.wipe = 0 if condemned else None
            made.append(home)
        self._namespace_ids.restore({space.ident for space in self.namespaces.values()})
        self._scope_ids.restore({tenant.ident for tenant in self.scopes.values()})
        return made

    def condemn(self, namespace: str, scope: bytes | None, wipe: int) -> bool:
        """Take homes out of the dicts: all of a namespace, or that of one scope in it. Whether there were any."""
        space = self.namespaces.get(namespace)
        if space is None or not space.homes:
            return False
        if scope is None:
            space.homes = {}
            if space.wipes is None:
                space.wipes = {}
            space.wipes[space.epoch] = wipe
            space.epoch += 1
            return True
        home = space.homes.pop(scope, None)
        if home is None:
            return False
        home.wipe = wipe
        return True

    def release(self, home: Home, references: int) -> bool:
        """Drop references; the last one takes the home, and perhaps its namespace and scope, along.

        Returns:
            Whether the scope went.
        """
        home.references -= references
        assert home.references >= 0, "references to a home"
        if home.references:
            return False
        assert home.live_objects == home.charged_au == 0, "a home with objects and without references"
        self.homes[home.ident] = None
        self._home_ids.give_back(home.ident)
        space, tenant = home.namespace, home.scope
        if space.homes.get(tenant.name) is home:
            del space.homes[tenant.name]
        space.refs -= 1
        tenant.refs -= 1
        if not space.refs:
            del self.namespaces[space.name]
            self._namespace_ids.give_back(space.ident)
        if tenant.refs:
            return False
        assert tenant.leases == tenant.charged_au == tenant.members == 0, (
            "a scope without homes holds something"
        )
        del self.scopes[tenant.name], self._scope_by_ident[tenant.ident]
        self._scope_ids.give_back(tenant.ident)
        return True
