"""Bringing the objects of one job into the cache, and out of it. Runs in a worker's threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from xkv_rpc.messages import StoreStatus
from xkv_vllm_connector.channel import KEYS_MAX, ChannelError
from xkv_vllm_connector.keys import key_of, stem_of
from xkv_vllm_connector.metadata import LoadJob, StoreJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_vllm_connector.channel import Channel
    from xkv_vllm_connector.groups import Geometry
    from xkv_vllm_connector.metadata import Part
    from xkv_vllm_connector.metrics import Stats

_NS_PER_MS: Final = 1_000_000
HELD: Final = frozenset({StoreStatus.STORED, StoreStatus.EXISTS})
_J = TypeVar("_J", LoadJob, StoreJob)


class Copier(Protocol):
    """Copies blocks of a group (`copies.GroupCopier`)."""

    def object_bytes(self, blocks: int) -> int:
        """Size of an object of so many blocks."""

    def gather(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy blocks into an object's bytes."""

    def scatter(self, blocks: Sequence[int], source: memoryview) -> None:
        """Copy an object's bytes into blocks."""


class Ordering(Protocol):
    """Orders copies behind the model's work (`copies.Streams`)."""

    def mark(self) -> Any:
        """Note how far the model's work has been ordered."""

    def run(self, mark: Any, work: Callable[[], None]) -> None:
        """Do work after `mark`, and wait until it is done."""


@dataclass(slots=True)
class Order(Generic[_J]):
    """A job on its way to a thread."""

    job: _J
    fingerprint: bytes
    mark: Any
    """How far the model's work had been ordered."""
    ordered_ns: int
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Kit:
    """What the transfers of one worker have in common.

    Attributes:
        geometry: The cache groups.
        rank: The worker's; of workers with the same bytes, the first one's.
        copiers: One for each group of the geometry.
        ordering: Orders copies behind the model's work.
        stats: Counts.
        lock: Guards the counts.
        clock: Monotonic nanoseconds.
    """

    geometry: Geometry
    rank: int
    copiers: Sequence[Copier]
    ordering: Ordering
    stats: Stats
    clock: Callable[[], int]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keys(self, fingerprint: bytes, parts: Sequence[Part]) -> list[bytes]:
        """Make the keys of these parts."""
        stems = [stem_of(fingerprint, group.group_id, self.rank) for group in self.geometry.groups]
        return [key_of(stems[part.group], part.chunk, part.block_hash) for part in parts]

    def sizes(self, parts: Sequence[Part]) -> list[int]:
        """Say how large the objects of these parts are."""
        return [self.copiers[part.group].object_bytes(len(part.blocks)) for part in parts]

    def left_ms(self, order: Order[Any], limit_ms: int) -> int:
        """Say how many milliseconds a job has left.

        Raises:
            ChannelError: None.
        """
        left_ms = limit_ms - (self.clock() - order.ordered_ns) // _NS_PER_MS
        if left_ms <= 0:
            raise ChannelError("the time is over", unavailable=True)
        return left_ms

    def late(self, order: Order[Any], limit_ms: int) -> bool:
        """Whether the time of a job is over."""
        return self.clock() - order.ordered_ns >= limit_ms * _NS_PER_MS


def load(kit: Kit, channel: Channel, order: Order[LoadJob], limit_ms: int) -> None:
    """Bring all objects of a job into the cache.

    Raises:
        ChannelError: One of them could not be brought; what was to be filled counts as not filled.
    """
    parts = order.job.parts
    sizes = kit.sizes(parts)
    channel.ready(kit.left_ms(order, limit_ms))
    at = 0
    while at < len(parts):
        lease = parts[at].lease
        batch = _of_one_lease(parts[at : at + channel.fit(sizes[at:])])
        end = at + len(batch)
        keys = kit.keys(order.fingerprint, batch)
        views = channel.load(order.job.scope, keys, sizes[at:end], lease, kit.left_ms(order, limit_ms))
        kit.ordering.run(order.mark, partial(_scatter, kit, batch, views))
        at = end
    with kit.lock:
        kit.stats.add("load_bytes", sum(sizes))
        kit.stats.add("chunks_loaded", len(parts))


def _of_one_lease(parts: Sequence[Part]) -> list[Part]:
    """Take parts as long as one lease covers them: those of the next group begin with the first lease again."""
    lease = parts[0].lease
    return list(takewhile(lambda part: part.lease == lease, parts))


def store(kit: Kit, channel: Channel, orders: Sequence[Order[StoreJob]], limit_ms: int) -> set[int]:
    """Have the objects of several jobs kept that are not held yet, in as few messages as tenants allow.

    Returns:
        The jobs whose objects are all held now. A job whose time was over before its turn is not among them.

    Raises:
        ChannelError: There was no answer; no job counts as done.
    """
    tenants: dict[tuple[bytes, bytes], list[Order[StoreJob]]] = {}
    for order in orders:
        if not kit.late(order, limit_ms):
            tenants.setdefault((order.job.scope, order.fingerprint), []).append(order)
    well: set[int] = set()
    for (scope, fingerprint), mine in tenants.items():
        channel.ready(min(kit.left_ms(order, limit_ms) for order in mine))
        well |= _Batch(kit, channel, scope, fingerprint, mine, limit_ms).store()
    return well


class _Batch:
    """Jobs of one tenant. Two of them may have the same object: it is stored once, and both have it then."""

    def __init__(
        self,
        kit: Kit,
        channel: Channel,
        scope: bytes,
        fingerprint: bytes,
        orders: Sequence[Order[StoreJob]],
        limit_ms: int,
    ) -> None:
        self._kit = kit
        self._channel = channel
        self._scope = scope
        self._orders = orders
        self._limit_ms = limit_ms
        self._mark = orders[-1].mark  # of one stream: what came before is done then, too
        self._parts: dict[bytes, Part] = {}
        self._owners: dict[bytes, list[int]] = {}
        self._well = {order.job.job_id for order in orders}
        for order in orders:
            for key, part in zip(kit.keys(fingerprint, order.job.parts), order.job.parts, strict=True):
                self._parts[key] = part
                self._owners.setdefault(key, []).append(order.job.job_id)

    def store(self) -> set[int]:
        """Store what is missing; returns the jobs that have everything now."""
        keys = list(self._parts)
        for at in range(0, len(keys), KEYS_MAX):
            asked = keys[at : at + KEYS_MAX]
            missing = self._channel.missing(self._scope, asked, self._left_ms)
            wanted = [key for key, lost in zip(asked, missing, strict=True) if lost]
            with self._kit.lock:
                self._kit.stats.add("chunks_held", len(asked) - len(wanted))
            self._store(wanted)
        return self._well

    @property
    def _left_ms(self) -> int:
        return min(self._kit.left_ms(order, self._limit_ms) for order in self._orders)

    def _store(self, keys: Sequence[bytes]) -> None:
        kit, channel = self._kit, self._channel
        parts = [self._parts[key] for key in keys]
        sizes = kit.sizes(parts)
        at = 0
        while at < len(keys):
            end = at + channel.fit(sizes[at:])
            places = channel.places(sizes[at:end])
            kit.ordering.run(
                self._mark, partial(_gather, kit, parts[at:end], [place.view for place in places])
            )
            results = channel.store(self._scope, list(keys[at:end]), places, self._left_ms)
            _count(kit, results, sizes[at:end])
            for key, result in zip(keys[at:end], results, strict=True):
                if result not in HELD:
                    self._well.difference_update(self._owners[key])
            at = end


def _count(kit: Kit, results: list[StoreStatus], sizes: Sequence[int]) -> None:
    stored = [size for size, result in zip(sizes, results, strict=True) if result is StoreStatus.STORED]
    held = sum(result in HELD for result in results)
    being_written = results.count(StoreStatus.IN_PROGRESS)
    with kit.lock:
        kit.stats.add("chunks_stored", len(stored))
        kit.stats.add("store_bytes", sum(stored))
        kit.stats.add("chunks_refused", len(results) - held - being_written)


def _scatter(kit: Kit, parts: Sequence[Part], views: Sequence[memoryview]) -> None:
    for part, view in zip(parts, views, strict=True):
        kit.copiers[part.group].scatter(part.blocks, view)


def _gather(kit: Kit, parts: Sequence[Part], views: Sequence[memoryview]) -> None:
    for part, view in zip(parts, views, strict=True):
        kit.copiers[part.group].gather(part.blocks, view)
