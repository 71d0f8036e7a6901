"""Blocking calls in threads that nobody has to wait for: the loop's own pool would hold up its end while one of them hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Aside:
    """Runs calls side by side, each in a thread of its own, at most `at_once` of them; those that hang count."""

    def __init__(self, name: str, at_once: int, full: str) -> None:
        self._name = name
        self._full = full
        self._free = threading.BoundedSemaphore(at_once)

    async def run(self, function: Callable[[], T], *, late: Callable[[T], None] | None = None) -> T:
        """Return what the function does. Cancelled, this leaves the thread to end by itself.

        Args:
            function: is called in a thread.
            late: gets what comes when nobody waits for it any more.

        Raises:
            OSError: `full`: too many hang already.
        """
        if not self._free.acquire(blocking=False):
            raise OSError(errno.EBUSY, self._full)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(error: Exception | None, found: T | None) -> None:
            if answer.done():
                if error is None and late is not None:
                    late(found)  # type: ignore[arg-type] # without an error it is what the function returned
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(found)  # type: ignore[arg-type]

        def work() -> None:
            error, found = None, None
            try:
                found = function()
            except Exception as caught:  # noqa: BLE001 - it is the caller's, who gets it
                error = caught
            finally:
                self._free.release()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, error, found)

        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise OSError(errno.EAGAIN, str(error)) from None
        return await answer
