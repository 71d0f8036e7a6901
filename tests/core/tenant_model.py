"""What quotas and isolated eviction must do, as plainly as it can be said: dicts of keys in the order of their use."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xkv_gateway.core.tenancy import Enforcement, EvictionPolicy, EvictionRules

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Model:
    """A card on which everything is durable at once and nothing is leased."""

    rules: EvictionRules
    capacity: int
    ident_of: Callable[[bytes], int]
    """What breaks ties between scopes of equal fullness."""
    limits: dict[bytes, int] = field(default_factory=dict)
    leaving: dict[bytes, int] = field(default_factory=dict)
    held: dict[bytes, OrderedDict[tuple[str, bytes], int]] = field(default_factory=dict)
    """Scope -> (namespace, key) -> units, the oldest first."""
    clock: int = 0
    used_at: dict[tuple[bytes, str, bytes], int] = field(default_factory=dict)

    def limit(self, scope: bytes) -> int | None:
        if self.rules.policy is EvictionPolicy.NOOP:
            return None
        if scope in self.limits:
            return self.limits[scope]
        if scope in self.leaving:
            return self.leaving[scope]
        if self.rules.policy is EvictionPolicy.LRU:
            return None
        return self.rules.unregistered_limit_bytes // 1024

    def used(self, scope: bytes) -> int:
        return sum(self.held.get(scope, {}).values())

    def total(self) -> int:
        return sum(map(self.used, self.held))

    def touch(self, scope: bytes, name: tuple[str, bytes]) -> None:
        self.clock += 1
        self.used_at[scope, *name] = self.clock
        self.held[scope].move_to_end(name)

    def drop_oldest(self, scope: bytes) -> int:
        name, units = self.held[scope].popitem(last=False)
        del self.used_at[scope, *name]
        if not self.held[scope]:
            del self.held[scope]
        return units

    def oldest_scope(self) -> bytes:
        return min(self.held, key=lambda scope: self.used_at[scope, *next(iter(self.held[scope]))])

    def fullness(self, scope: bytes, more: int = 0) -> float:
        limit = self.limit(scope)
        limit = self.capacity if limit is None else limit
        return (self.used(scope) + more) / limit if limit else math.inf

    def giver(self, asking: bytes | None, more: int) -> bytes:
        if self.rules.policy is EvictionPolicy.LRU:
            return self.oldest_scope()
        fullest = max(self.held, key=lambda scope: (self.fullness(scope), -self.ident_of(scope)))
        if asking in self.held and self.fullness(asking, more) >= self.fullness(fullest):
            return asking
        return fullest

    def store(self, scope: bytes, name: tuple[str, bytes], units: int) -> str:
        if name in self.held.get(scope, {}):
            return "exists"
        if units > self.capacity:
            return "too_large"
        limit = self.limit(scope)
        if self.rules.enforcement is Enforcement.HARD and limit is not None:
            if limit == 0 or units > limit:
                return "over_quota"
            while self.used(scope) + units > limit:
                self.drop_oldest(scope)
        if self.total() + units > self.capacity and self.rules.policy is EvictionPolicy.NOOP:
            return "no_space"
        while self.total() + units > self.capacity:
            self.drop_oldest(self.giver(scope, units))
        self.held.setdefault(scope, OrderedDict())[name] = units
        self.touch(scope, name)
        return "stored"

    def load(self, scope: bytes, name: tuple[str, bytes]) -> bool:
        if name not in self.held.get(scope, {}):
            return False
        self.touch(scope, name)
        return True

    def clear_limit(self, scope: bytes) -> None:
        if scope in self.limits:
            self.leaving[scope] = self.limits.pop(scope)

    def cycle(self) -> None:
        self.leaving.clear()
        if self.rules.policy is EvictionPolicy.NOOP:
            return
        for scope in list(self.held):
            limit, used = self.limit(scope), self.used(scope)
            if limit is None:
                continue
            excess = used - limit
            if self.rules.enforcement is Enforcement.SOFT and limit:
                full = used >= self.rules.trigger_watermark * limit
                excess = math.ceil(self.rules.eviction_ratio * used) if full else 0
            while excess > 0:
                excess -= self.drop_oldest(scope)
        if self.total() >= self.rules.trigger_watermark * self.capacity:
            missing = math.ceil(self.rules.eviction_ratio * self.total())
            while missing > 0:
                missing -= self.drop_oldest(self.giver(None, 0))
