"""A worker's side: two threads that bring objects into the cache and out of it. One instance a rank.

The engine's thread only hands over jobs and collects what has ended. Loads and stores have a thread and a channel each, so
that a store never holds up a load.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any, Final

from xkv_vllm_connector.channel import ChannelError
from xkv_vllm_connector.metadata import WorkerReport
from xkv_vllm_connector.transfers import Order, load, store

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_rpc.errors import ErrorCode
    from xkv_vllm_connector.channel import Channel
    from xkv_vllm_connector.metadata import LoadJob, StepPlan, StoreJob
    from xkv_vllm_connector.settings import Settings
    from xkv_vllm_connector.transfers import Kit

IDLE_WAIT_S: Final = 0.002
"""How long a step that computes nothing waits for a job to end, instead of spinning and keeping the threads from working."""
STORES_TOGETHER: Final = 64
"""Store jobs that go in one message, if so many have gathered while the last ones were under way."""
DRAIN_S: Final = 10.0
"""How long an engine that ends waits for its last stores."""


class WorkerSide:
    """See the module.

    Args:
        settings: The settings.
        kit: What transfers need; its lock guards this object, too.
        channels: For loads and for stores.
        warn: Takes one line for the operator.
        writer: Whether this worker stores; another one with the same bytes does otherwise.
    """

    def __init__(
        self,
        settings: Settings,
        kit: Kit,
        channels: tuple[Channel, Channel],
        warn: Callable[[str], None],
        *,
        writer: bool = True,
    ) -> None:
        self._settings = settings
        self._kit = kit
        self._lock = kit.lock
        self._writer = writer
        self._load_channel, self._store_channel = channels
        self._warn = warn
        self._report = WorkerReport()
        self._under_way = 0
        self._news = threading.Event()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._sync_failures = 0
        self._refusals: set[ErrorCode] = set()
        self._loads: queue.SimpleQueue[Order[LoadJob] | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[Order[StoreJob] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=arguments, name=name, daemon=True)
            for name, arguments in (
                ("xkv-load", (self._load_channel, self._loads, self._load, 1)),
                ("xkv-store", (self._store_channel, self._stores, self._store, STORES_TOGETHER)),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- the engine's thread ------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the loads of a step; wait for those that the step's own model run needs."""
        if not plan.loads:
            return
        mark = self._kit.ordering.mark()
        orders = [Order(job, plan.fingerprint, mark, self._kit.clock()) for job in plan.loads]
        with self._lock:
            self._under_way += len(orders)
        for order in orders:
            self._loads.put(order)
        for order in orders:
            if order.job.sync:
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
        mark = self._kit.ordering.mark()
        with self._lock:
            self._under_way += len(plan.stores)
        for job in plan.stores:
            self._stores.put(Order(job, plan.fingerprint, mark, self._kit.clock()))

    def pause(self, plan: StepPlan) -> None:
        """In a step that computes nothing, wait a moment for a job to end, if one is under way."""
        if plan.idle and self._under_way:
            self._news.wait(IDLE_WAIT_S)
        if self._news.is_set():
            self._news.clear()

    def take_received(self) -> tuple[set[str], set[str]]:
        """Return the requests whose asynchronous load has ended since the last call, and those of them that failed."""
        if not self._received:
            return set(), set()
        with self._lock:
            received, failed = self._received, self._failed
            self._received, self._failed = set(), set()
        return received, failed

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that a synchronous load did not fill."""
        if not self._bad_blocks:
            return set()
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """Return what the scheduler's side is to know, if there is anything."""
        if self._report.empty:
            return None
        with self._lock:
            report = self._report
            if report.empty:
                return None
            self._report = WorkerReport()
            report.sync_failures = self._sync_failures
        return report

    def take_stats(self) -> dict[str, Any] | None:
        """Return what was counted since the last call."""
        with self._lock:
            return self._kit.stats.take()

    def close(self) -> None:
        """Finish what was handed over, within bounds, and end the threads."""
        self._loads.put(None)
        self._stores.put(None)
        for thread in self._threads:
            thread.join(DRAIN_S)
        self._load_channel.close()
        self._store_channel.close()

    # --- the threads --------------------------------------------------------------------------------------

    def _serve(
        self,
        channel: Channel,
        orders: queue.SimpleQueue[Any],
        work: Callable[[list[Any]], None],
        together: int,
    ) -> None:
        with contextlib.suppress(ChannelError):
            # Memory that nobody has touched yet can take seconds to get: before the first request needs it.
            channel.ready(self._settings.load_timeout_ms)
        while True:
            taken = _take(orders, together)
            if not taken:
                return
            try:
                work(taken)
            except Exception as error:  # noqa: BLE001 # a task boundary: a thread that ends would let requests wait for ever
                self._warn(f"a bug: {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._under_way -= len(taken)
                for order in taken:
                    order.done.set()
                self._news.set()

    def _load(self, orders: list[Order[LoadJob]]) -> None:
        (order,) = orders
        well = away = False
        try:
            if not order.job.doomed:
                load(self._kit, self._load_channel, order, self._settings.load_timeout_ms)
                well = True
        except ChannelError as error:
            away = error.unavailable
        finally:
            # Whatever happens, the engine hears the end of it exactly once: a request must not wait for ever.
            self._load_ended(order, well=well, away=away)

    def _load_ended(self, order: Order[LoadJob], *, well: bool, away: bool) -> None:
        job = order.job
        with self._lock:
            self._kit.stats.time("load_seconds", (self._kit.clock() - order.ordered_ns) / 1e9)
            self._report.loads[job.request_id] = (1, well)
            self._report.unavailable |= away
            if not job.sync:
                self._received.add(job.request_id)
                if not well:
                    self._failed.add(job.request_id)
            elif not well:
                self._sync_failures += 1
                self._bad_blocks.update(block for part in job.parts for block in part.blocks if block)

    def _store(self, orders: list[Order[StoreJob]]) -> None:
        well: set[int] = set()
        away = False
        try:
            well = store(self._kit, self._store_channel, orders, self._settings.store_timeout_ms)
        except ChannelError as error:
            away = error.unavailable
            if error.code is not None and error.code not in self._refusals:
                self._refusals.add(error.code)
                self._warn(f"the gateway takes no stores, {error}; further ones only count in stores_failed")
        finally:
            now_ns = self._kit.clock()
            with self._lock:
                for order in orders:
                    job_id = order.job.job_id
                    self._kit.stats.time("store_seconds", (now_ns - order.ordered_ns) / 1e9)
                    self._report.stores[job_id] = (1, job_id in well)
                self._report.unavailable |= away
                if len(well) < len(orders):
                    self._kit.stats.add("stores_failed", len(orders) - len(well))


def _take(orders: queue.SimpleQueue[Any], together: int) -> list[Any]:
    """Wait for an order, and take what has gathered behind it; nothing: it is the end, which stays in the queue."""
    taken: list[Any] = []
    with contextlib.suppress(queue.Empty):
        while len(taken) < together:
            order = orders.get() if not taken else orders.get_nowait()
            if order is None:
                orders.put(None)
                break
            taken.append(order)
    return taken
