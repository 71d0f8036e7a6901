"""A worker's side: two threads that bring objects into the cache and out of it. One instance a rank.

The engine's thread only hands over jobs and collects what has ended. Loads and stores have a thread and a channel each, so
that a store never holds up a load.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from xkv_rpc.messages import StoreStatus
from xkv_vllm_connector.channel import ChannelError
from xkv_vllm_connector.keys import key_of, stem_of
from xkv_vllm_connector.metadata import WorkerReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_vllm_connector.channel import Channel
    from xkv_vllm_connector.groups import Geometry
    from xkv_vllm_connector.metadata import LoadJob, Part, StepPlan, StoreJob
    from xkv_vllm_connector.metrics import Stats
    from xkv_vllm_connector.settings import Settings

_NS_PER_MS: Final = 1_000_000
HELD: Final = frozenset({StoreStatus.STORED, StoreStatus.EXISTS})
IDLE_WAIT_S: Final = 0.002
"""How long a step that computes nothing waits for a job to end, instead of spinning and keeping the threads from working."""
DRAIN_S: Final = 10.0
"""How long an engine that ends waits for its last stores."""


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
class _Order:
    """A job on its way to a thread."""

    job: LoadJob | StoreJob
    fingerprint: bytes
    mark: Any
    ordered_ns: int
    done: threading.Event = field(default_factory=threading.Event)


class WorkerSide:
    """See the module.

    Args:
        settings: The settings.
        geometry: The cache groups.
        rank: This worker's; of workers with the same bytes, the first one's.
        writer: Whether this worker stores; another one with the same bytes does otherwise.
        copiers: One for each group of the geometry.
        ordering: Orders copies behind the model's work.
        channels: For loads and for stores.
        stats: Counts; guarded by this object's lock.
        clock: Monotonic nanoseconds.
        warn: Takes one line for the operator.
    """

    def __init__(
        self,
        settings: Settings,
        geometry: Geometry,
        rank: int,
        copiers: Sequence[Copier],
        ordering: Ordering,
        channels: tuple[Channel, Channel],
        stats: Stats,
        clock: Callable[[], int],
        warn: Callable[[str], None],
        *,
        writer: bool = True,
    ) -> None:
        self._settings = settings
        self._geometry = geometry
        self._rank = rank
        self._writer = writer
        self._copiers = copiers
        self._ordering = ordering
        self._load_channel, self._store_channel = channels
        self._stats = stats
        self._clock = clock
        self._warn = warn
        self._lock = threading.Lock()
        self._report = WorkerReport()
        self._under_way = 0
        self._news = threading.Event()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._sync_failures = 0
        self._loads: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(channel, orders, work), name=name, daemon=True)
            for name, channel, orders, work in (
                ("xkv-load", self._load_channel, self._loads, self._load),
                ("xkv-store", self._store_channel, self._stores, self._store),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- the engine's thread ------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the loads of a step; wait for those that the step's own model run needs."""
        if not plan.loads:
            return
        mark = self._ordering.mark()
        orders = [_Order(job, plan.fingerprint, mark, self._clock()) for job in plan.loads]
        for order in orders:
            self._hand_over(self._loads, order)
        for order, job in zip(orders, plan.loads, strict=True):
            if job.sync:
                order.done.wait()

    def start_stores(self, plan: StepPlan) -> None:
        """Begin the stores of a step; its model run has been ordered."""
        if not plan.stores:
            return
        void = plan.failures_seen < self._sync_failures
        if void or not self._writer:
            # After a failed synchronous load what the step computed may rest on nothing.
            with self._lock:
                for job in plan.stores:
                    self._report.stores[job.job_id] = (1, not void)
            return
        mark = self._ordering.mark()
        for job in plan.stores:
            self._hand_over(self._stores, _Order(job, plan.fingerprint, mark, self._clock()))

    def _hand_over(self, orders: queue.SimpleQueue[_Order | None], order: _Order) -> None:
        with self._lock:
            self._under_way += 1
        orders.put(order)

    def pause(self, plan: StepPlan) -> None:
        """In a step that computes nothing, wait a moment for a job to end, if one is under way."""
        if plan.idle and self._under_way:
            self._news.wait(IDLE_WAIT_S)
        self._news.clear()

    def take_received(self) -> tuple[set[str], set[str]]:
        """Return the requests whose asynchronous load has ended since the last call, and those of them that failed."""
        with self._lock:
            received, failed = self._received, self._failed
            self._received, self._failed = set(), set()
        return received, failed

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that a synchronous load did not fill."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """Return what the scheduler's side is to know, if there is anything."""
        with self._lock:
            report = self._report
            if report.empty:
                return None
            self._report = WorkerReport(sync_failures=0)
        report.sync_failures = self._sync_failures
        return report

    def take_stats(self) -> dict[str, Any] | None:
        """Return what was counted since the last call."""
        with self._lock:
            return self._stats.take()

    def close(self) -> None:
        """Finish what was handed over, within bounds, and end the threads."""
        for orders in (self._loads, self._stores):
            orders.put(None)
        for thread in self._threads:
            thread.join(DRAIN_S)
        self._load_channel.close()
        self._store_channel.close()

    # --- the threads --------------------------------------------------------------------------------------

    def _serve(
        self, channel: Channel, orders: queue.SimpleQueue[_Order | None], work: Callable[[_Order], None]
    ) -> None:
        with contextlib.suppress(ChannelError):
            # Memory that nobody has touched yet can take seconds to get: before the first request needs it.
            channel.ready(self._settings.load_timeout_ms)
        while True:
            order = orders.get()
            if order is None:
                return
            try:
                work(order)
            except Exception as error:  # noqa: BLE001 # a task boundary: a thread that ends would let requests wait for ever
                self._warn(f"a bug: {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._under_way -= 1
                order.done.set()
                self._news.set()

    def _keys(self, order: _Order, parts: Sequence[Part]) -> list[bytes]:
        groups = self._geometry.groups
        stems = [stem_of(order.fingerprint, group.group_id, self._rank) for group in groups]
        return [key_of(stems[part.group], part.chunk, part.block_hash) for part in parts]

    def _sizes(self, parts: Sequence[Part]) -> list[int]:
        return [self._copiers[part.group].object_bytes(len(part.blocks)) for part in parts]

    def _left_ms(self, order: _Order, limit_ms: int) -> int:
        """Milliseconds that a job has left.

        Raises:
            ChannelError: None.
        """
        left_ms = limit_ms - (self._clock() - order.ordered_ns) // _NS_PER_MS
        if left_ms <= 0:
            raise ChannelError("the time is over", unavailable=True)
        return left_ms

    def _load(self, order: _Order) -> None:
        job: Any = order.job
        well = False
        away = False
        try:
            if not job.doomed:
                self._load_parts(order, job)
                well = True
        except ChannelError as error:
            away = error.unavailable
        finally:
            # Whatever happens, the engine hears the end of it exactly once: a request must not wait for ever.
            self._load_ended(order, job, well=well, away=away)

    def _load_parts(self, order: _Order, job: LoadJob) -> None:
        channel = self._load_channel
        parts = job.parts
        sizes = self._sizes(parts)
        limit_ms = self._settings.load_timeout_ms
        channel.ready(self._left_ms(order, limit_ms))
        at = 0
        while at < len(parts):
            count = channel.fit(sizes[at:])
            lease = parts[at].lease
            batch = [part for part in parts[at : at + count] if part.lease == lease]
            count = len(batch)
            batch_sizes = sizes[at : at + count]
            views = channel.load(
                job.scope, self._keys(order, batch), batch_sizes, lease, self._left_ms(order, limit_ms)
            )
            self._ordering.run(order.mark, partial(self._scatter, batch, views))
            at += count
        with self._lock:
            self._stats.add("load_bytes", sum(sizes))
            self._stats.add("chunks_loaded", len(parts))

    def _scatter(self, parts: Sequence[Part], views: Sequence[memoryview]) -> None:
        for part, view in zip(parts, views, strict=True):
            self._copiers[part.group].scatter(part.blocks, view)

    def _load_ended(self, order: _Order, job: LoadJob, *, well: bool, away: bool) -> None:
        with self._lock:
            self._stats.time("load_seconds", (self._clock() - order.ordered_ns) / 1e9)
            self._report.loads[job.request_id] = (1, well)
            self._report.unavailable |= away
            if job.sync:
                if not well:
                    self._sync_failures += 1
                    self._bad_blocks.update(block for part in job.parts for block in part.blocks if block)
                return
            self._received.add(job.request_id)
            if not well:
                self._failed.add(job.request_id)

    def _store(self, order: _Order) -> None:
        job: Any = order.job
        well = False
        away = False
        try:
            well = self._store_parts(order, job)
        except ChannelError as error:
            away = error.unavailable
        finally:
            with self._lock:
                self._stats.time("store_seconds", (self._clock() - order.ordered_ns) / 1e9)
                self._report.stores[job.job_id] = (1, well)
                self._report.unavailable |= away
                if not well:
                    self._stats.add("stores_failed")

    def _store_parts(self, order: _Order, job: StoreJob) -> bool:
        channel = self._store_channel
        limit_ms = self._settings.store_timeout_ms
        channel.ready(self._left_ms(order, limit_ms))
        keys = self._keys(order, job.parts)
        missing = channel.missing(job.scope, keys, self._left_ms(order, limit_ms))
        wanted = [(part, key) for part, key, lost in zip(job.parts, keys, missing, strict=True) if lost]
        sizes = self._sizes([part for part, _ in wanted])
        with self._lock:
            self._stats.add("chunks_held", len(keys) - len(wanted))
        well = True
        at = 0
        while at < len(wanted):
            count = channel.fit(sizes[at:])
            places = channel.places(sizes[at : at + count])
            batch = wanted[at : at + count]
            gather = partial(self._gather, [part for part, _ in batch], [place.view for place in places])
            self._ordering.run(order.mark, gather)
            results = channel.store(
                job.scope, [key for _, key in batch], places, self._left_ms(order, limit_ms)
            )
            well &= self._count_stored(results, sizes[at : at + count])
            at += count
        return well

    def _gather(self, parts: Sequence[Part], views: Sequence[memoryview]) -> None:
        for part, view in zip(parts, views, strict=True):
            self._copiers[part.group].gather(part.blocks, view)

    def _count_stored(self, results: list[StoreStatus], sizes: Sequence[int]) -> bool:
        stored = [size for size, result in zip(sizes, results, strict=True) if result is StoreStatus.STORED]
        held = sum(result in HELD for result in results)
        being_written = results.count(StoreStatus.IN_PROGRESS)
        with self._lock:
            self._stats.add("chunks_stored", len(stored))
            self._stats.add("store_bytes", sum(stored))
            self._stats.add("chunks_refused", len(results) - held - being_written)
        return held == len(results)
