"""Threads that block in the kernel on behalf of a loop. Daemon threads: one that hangs there keeps no process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Job:
    """A blocking call. `future` gets its end, on the loop. Whoever takes the turn decides whether it begins."""

    __slots__ = ("_turn", "arguments", "error", "function", "future")

    def __init__(
        self, function: Callable[..., None], arguments: tuple[Any, ...], future: asyncio.Future[None]
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.future = future
        self.error: OSError | None = None
        self._turn = [None]

    def take(self) -> bool:
        """Take the turn; True for the first one only."""
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True


class Workers:
    """At most `threads` threads, started as they are needed. Ends are told in bunches: one wake-up of the loop for many."""

    def __init__(self, threads: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads_max = threads
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: deque[Job] = deque()
        self._told = False
        self._started = 0
        self.unfinished = 0
        """Calls that were given and have not ended. Counted on the loop."""

    def submit(self, function: Callable[..., None], *arguments: Any) -> Job:
        """Have a thread call the function, which raises nothing but OSError."""
        job = Job(function, arguments, self._loop.create_future())
        self.unfinished += 1
        if self.unfinished > self._started and self._started < self._threads_max:
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._queue.put(job)
        return job

    def withdraw(self, job: Job) -> bool:
        """Take a call back that no thread has begun; False: it has begun."""
        if not job.take():
            return False
        self.unfinished -= 1
        job.future.cancel()
        return True

    def close(self) -> None:
        """Let the threads end once they have nothing to do."""
        for _ in range(self._started):
            self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.take():
                continue
            try:
                job.function(*job.arguments)
            except OSError as error:
                job.error = error
            self._ended.append(job)
            if not self._told:
                self._told = True
                try:
                    self._loop.call_soon_threadsafe(self._tell)
                except RuntimeError:
                    return  # the loop has been closed: nobody waits

    def _tell(self) -> None:
        # In this order: what ends after the flag is down asks for another wake-up.
        self._told = False
        while self._ended:
            job = self._ended.popleft()
            self.unfinished -= 1
            if job.future.done():
                continue
            if job.error is None:
                job.future.set_result(None)
            else:
                job.future.set_exception(job.error)
