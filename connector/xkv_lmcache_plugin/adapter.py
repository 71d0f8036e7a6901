"""The class that LMCache loads: its tasks and event descriptors around `backend.Backend`."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from xkv_lmcache_plugin.backend import Backend, parse_params

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_lmcache_plugin.keys import ObjectKey

logger = init_logger(__name__)
UNREAD_MAX: Final = 4096
"""Results that LMCache has not asked for; beyond, the oldest goes, as a task that LMCache has given up."""


class _Kind:
    """Tasks of one kind: their thread, their results, and the descriptor that tells of them."""

    def __init__(self, name: str) -> None:
        self.notifier: Any = create_event_notifier()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"xkv-l2-{name}")
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}

    def submit(self, task: int, work: Callable[[], Any], failure: Any) -> None:
        """Do `work` in the kind's thread; its result is `failure` if it does not get to its end."""

        def run() -> None:
            result = failure
            try:
                result = work()
            finally:
                # Whatever happens, LMCache hears of the end of the task.
                with self._lock:
                    if len(self._results) >= UNREAD_MAX:
                        self._results.pop(next(iter(self._results)))
                    self._results[task] = result
                self.notifier.notify()

        self._thread.submit(run).add_done_callback(_log_bug)

    def take(self, task: int) -> Any:
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def end(self) -> None:
        """Finish the task that runs, and drop those that wait."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        self.notifier.close()


def _log_bug(done: Any) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("FusIOnX: a bug: %s: %s", type(error).__name__, error)


def _bytes_of(objects: Sequence[Any]) -> list[memoryview]:
    return [memoryview(one.byte_array).cast("B") for one in objects]


class FusIOnXL2Adapter(L2AdapterInterface):  # type: ignore[misc] # LMCache is not there where this is checked
    """Keeps LMCache's second level on the card, through the gateway.

    Args:
        config: `adapter_params`: settings of the vLLM connector, those that `backend.SETTINGS` names.
        l1_memory_desc: Not used: bytes are copied through the region that is shared with the gateway.
    """

    def __init__(self, config: dict[str, Any], l1_memory_desc: Any = None) -> None:  # noqa: ARG002 - LMCache gives it
        super().__init__()
        settings = parse_params(config)
        self._backend = Backend(settings, time.monotonic_ns)
        self._stores, self._lookups, self._loads = _Kind("store"), _Kind("lookup"), _Kind("load")
        self._lock = threading.Lock()
        self._last_task = 0
        logger.info(
            "FusIOnX: on: gateway %s, namespace %r, require_cache_salt %s",
            settings.endpoint,
            settings.key_namespace,
            settings.require_cache_salt,
        )

    def _new_task(self) -> int:
        with self._lock:
            self._last_task += 1
            return self._last_task

    def get_store_event_fd(self) -> int:
        """Return the descriptor that tells of ended stores."""
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that tells of ended lookups."""
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that tells of ended loads."""
        return int(self._loads.notifier.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to store objects."""
        task = self._new_task()

        def work() -> Any:
            buffers = _bytes_of(objects)
            outcome = self._backend.store(keys, buffers)
            sizes = [buffers[at].nbytes for at in outcome.written]
            if sizes:
                self._notify_keys_stored([keys[at] for at in outcome.written], sizes)
            return L2StoreResult(outcome.complete, sum(sizes))

        self._stores.submit(task, work, L2StoreResult(False, 0))
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the stores that have ended since the last call."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, Any]) -> int:  # noqa: ARG002
        """Begin to look up objects; those that are found are held."""
        task = self._new_task()
        self._lookups.submit(task, lambda: _bitmap(self._backend.lookup(keys)), Bitmap(len(keys)))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return the outcome of a lookup, once; None: not yet."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Hold these objects no more."""
        self._lookups.submit(self._new_task(), lambda: self._backend.unlock(keys), None)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Begin to load objects."""
        task = self._new_task()

        def work() -> Any:
            came = self._backend.load(keys, _bytes_of(objects))
            if any(came):
                self._notify_keys_accessed([key for key, well in zip(keys, came, strict=True) if well])
            return _bitmap(came)

        self._loads.submit(task, work, Bitmap(len(keys)))
        return task

    def query_load_result(self, task_id: int) -> Any:
        """Return the outcome of a load, once; None: not yet."""
        return self._loads.take(task_id)

    def report_status(self) -> dict[str, Any]:
        """Return what an operator may see."""
        return {"is_healthy": True, "type": type(self).__name__, **self._backend.status()}

    def close(self) -> None:
        """End it: what runs is finished."""
        for kind in (self._stores, self._lookups, self._loads):
            kind.end()
        self._backend.close()
        for kind in (self._stores, self._lookups, self._loads):
            kind.close()


def _bitmap(bits: list[bool]) -> Any:
    result = Bitmap(len(bits))
    for at, bit in enumerate(bits):
        if bit:
            result.set(at)
    return result
