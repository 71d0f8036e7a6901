"""An event loop on virtual time: one seed, one interleaving.

    time        moves only when nothing can run, straight to the next timer: hours cost milliseconds
    order       runnable *task steps* are shuffled by the seed, and now and then one is held back for a turn; plain
                `call_soon` callbacks keep their order, as asyncio promises
    deadlock    every task waits and no timer is armed: reported, never a hang
    livelock    callbacks keep each other busy and time stands still: reported as well
    threads     work for an executor runs on the loop, after a drawn delay; anything else from outside is refused
    failures    whatever reaches the loop's exception handler (a failing callback, an exception that nobody looked at)
                is kept in `failures`, and is the failure of the run

It rests on two private names of asyncio (`_run_once`, `_ready`), which `test_loop.py` checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    import random
    from collections import deque
    from collections.abc import Callable, Coroutine

START_NS: Final = 1_000_000_000_000
"""Not zero, so that a time that was forgotten shows."""
ABANDONING_MAX: Final = 3
"""So often all tasks that are left are cancelled."""
TURNS_WITHOUT_TIME_MAX: Final = 20_000
HOLD_BACK_PROBABILITY: Final = 0.1
EXECUTOR_DELAY_NS_MAX: Final = 2_000_000


class SimulationError(Exception):
    """The run cannot go on."""


class Deadlock(SimulationError):  # noqa: N818 - a finding, not a failure of the loop
    """Every task waits and no timer is armed."""


class Livelock(SimulationError):  # noqa: N818 - as above
    """Callbacks run for ever and time stands still."""


class _VirtualSelector:
    """What asyncio takes for the operating system: waiting moves the clock."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"every task waits and no timer is armed: {self._loop.waiting()}")
        self._loop.advance(math.ceil(timeout * 1e9))
        return []


class SimLoop(asyncio.BaseEventLoop):
    """The loop of one run. Draws from `rng` alone."""

    _ready: deque[asyncio.Handle]

    def __init__(self, rng: random.Random, *, keep_trace: bool = False) -> None:
        super().__init__()
        self._rng = rng
        self._now_ns = START_NS
        self._turns_without_time = 0
        self._selector = _VirtualSelector(self)
        self._clock_resolution = 1e-9
        self._trace = hashlib.blake2b(digest_size=8) if keep_trace else None
        self.failures: list[BaseException] = []
        self.set_exception_handler(self._keep_failure)
        self.set_task_factory(self._named_task)
        self._tasks_made = 0

    def clock(self) -> int:
        """Virtual monotonic time in ns."""
        return self._now_ns

    def time(self) -> float:
        return self._now_ns / 1e9

    def advance(self, duration_ns: int) -> None:
        """Move the clock. For the selector."""
        if duration_ns > 0:
            self._now_ns += duration_ns
            self._turns_without_time = 0

    def trace(self) -> str:
        """Digest of which task ran when, so far."""
        assert self._trace is not None
        return self._trace.hexdigest()

    def waiting(self) -> list[str]:
        """Names of the tasks that are not done."""
        return sorted(task.get_name() for task in asyncio.all_tasks(self))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end. Raises what it raised, and the first failure that nobody else caught."""
        try:
            self.run_until_complete(work)
        except SimulationError:
            self._abandon()
            raise
        if self.failures:
            raise self.failures[0]

    def close(self) -> None:
        """Drop whatever still waits, without a sound."""
        self._abandon()
        super().close()

    # --- what asyncio calls ---------------------------------------------------------------------------------

    def _run_once(self) -> None:
        self._turns_without_time += 1
        if self._turns_without_time > TURNS_WITHOUT_TIME_MAX:
            raise Livelock(f"{TURNS_WITHOUT_TIME_MAX} turns and time stands still: {self.waiting()}")
        if self._ready:
            self._shuffle()
        super()._run_once()  # type: ignore[misc] # private: see the module's documentation

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> NoReturn:
        raise SimulationError("something outside of the loop wants to wake it: threads are forbidden here")

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - an executor hands every exception to its future
                future.set_exception(error)

        self.call_later(self._rng.randrange(EXECUTOR_DELAY_NS_MAX) / 1e9, work)
        return future

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise SimulationError("real sockets are forbidden here")

    # --- inside ---------------------------------------------------------------------------------------------

    def _shuffle(self) -> None:
        """Permute the task steps among the places that task steps have; hold some back behind everything else."""
        ready = self._ready
        steps = [at for at, handle in enumerate(ready) if _task_of(handle) is not None]
        handles = [ready[at] for at in steps]
        self._rng.shuffle(handles)
        for at, handle in zip(steps, handles, strict=True):
            ready[at] = handle
        held: list[asyncio.Handle] = []
        if len(ready) > 1 and steps and self._rng.random() < HOLD_BACK_PROBABILITY:
            held.append(self._rng.choice(handles))
            ready.remove(held[0])
            # Behind what is added in this turn: the step runs in the next one.
            super().call_soon(lambda: ready.append(held[0]))
        if self._trace is not None:
            for handle in ready:
                task = _task_of(handle)
                self._trace.update(f"{self._now_ns} {task.get_name() if task else '-'}\n".encode())

    def _named_task(self, loop: object, coro: Any, **options: Any) -> asyncio.Task[Any]:
        # asyncio numbers tasks over the whole process; a trace needs numbers of its own.
        self._tasks_made += 1
        options.setdefault("name", f"task {self._tasks_made} {getattr(coro, '__qualname__', '')}")
        return asyncio.Task(coro, loop=self, **options)

    def _keep_failure(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(
            error if error is not None else SimulationError(f"{context['message']} {context.get('task')}")
        )

    def _abandon(self) -> None:
        """End the tasks that are left; what they raise on the way out is of no interest."""
        self.set_exception_handler(lambda *_: None)
        if self.is_closed() or self.is_running():
            return
        for _ in range(ABANDONING_MAX):
            # On their way out they may begin others.
            tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self._turns_without_time = 0
            with contextlib.suppress(SimulationError):
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined] # it would warn at exit
            # Now, and not when the collector comes: the loop is closed by then.
            with contextlib.suppress(RuntimeError):
                task.get_coro().close()


def _task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined] # private, as above
    return owner if isinstance(owner, asyncio.Task) else None
