"""The order of one connection's requests: pure, no I/O.

Requests of one connection take effect in the order of their arrival, though their I/O overlaps. A load takes effect
when its objects are pinned, a delete when it is applied: both at once. A store takes effect when it is committed (a reservation when it has its room),
long after it began. So a request that touches a key which an unfinished store of the same connection is writing waits
for that store, and whatever comes behind a waiting request waits too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The identities that a request touches; `writes`: its effect comes when it is finished, not when it starts."""

    namespace: str
    scope: bytes
    keys: Sequence[bytes]
    writes: bool


class ConnectionOrder(Generic[T]):
    """Decides when each request of one connection may start. Bounded by the server's requests in flight for a peer."""

    __slots__ = ("_waiting", "_writing")

    def __init__(self) -> None:
        self._writing: dict[tuple[str, bytes], set[bytes]] = {}
        self._waiting: deque[tuple[T, Footprint | None]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nothing is written and nothing waits: then the object may be dropped."""
        return not self._writing and not self._waiting

    def arrive(self, request: T, footprint: Footprint | None) -> bool:
        """Take a request. True: start it now; False: `finished` will return it."""
        if self._waiting or self._conflicts(footprint):
            self._waiting.append((request, footprint))
            return False
        self._begin(footprint)
        return True

    def finished(self, footprint: Footprint) -> Iterator[T]:
        """Note that a writing request has taken effect; yields, in order, the requests that start now."""
        if footprint.keys:
            keys = self._writing[footprint.namespace, footprint.scope]
            keys.difference_update(footprint.keys)
            if not keys:
                del self._writing[footprint.namespace, footprint.scope]
        while self._waiting and not self._conflicts(self._waiting[0][1]):
            request, next_footprint = self._waiting.popleft()
            self._begin(next_footprint)
            yield request

    def _conflicts(self, footprint: Footprint | None) -> bool:
        if footprint is None or not self._writing:
            return False
        keys = self._writing.get((footprint.namespace, footprint.scope))
        return keys is not None and not keys.isdisjoint(footprint.keys)

    def _begin(self, footprint: Footprint | None) -> None:
        if footprint is not None and footprint.writes and footprint.keys:
            self._writing.setdefault((footprint.namespace, footprint.scope), set()).update(footprint.keys)
