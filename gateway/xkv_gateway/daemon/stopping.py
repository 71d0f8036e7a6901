"""How the gateway is told to end, and what happens when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.blocks import CardFailed
from xkv_gateway.card.fence import CardLost
from xkv_gateway.errors import ExitCode
from xkv_nvmeof.blockdev import DeviceError
from xkv_process.signals import listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xkv_gateway.card.session import CardSession

log = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
STOP_DEADLINE_S: Final = 4.8
"""From the first signal to the end of the process, whatever clients, the card or a hung call do."""


class StopRequest:
    """Set by the first SIGINT or SIGTERM. A second one, or the deadline, ends the process on the spot.

    That leaves nothing behind: the soft card's process is killed (`at_force`), stale sockets are replaced by the next
    start, and acknowledged stores are on the card already.
    """

    def __init__(self) -> None:
        self.at_force: list[Callable[[], None]] = []
        """Called before the process ends on the spot; they return at once and may run in another thread."""
        self._event = asyncio.Event()
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to the signals inside the block."""
        handlers = {number: partial(self._on_signal, number) for number in SIGNALS}
        try:
            with listening(asyncio.get_running_loop(), handlers):
                yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def wait(self) -> None:
        """Return once the gateway is to end."""
        await self._event.wait()

    def request(self) -> None:
        """Ask for an orderly end."""
        self._event.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._event.is_set():
            self._force(f"{number.name} again")
        log.info("%s: ending", number.name)
        # A thread, because the loop itself may be what hangs.
        self._timer = threading.Timer(STOP_DEADLINE_S, self._force, ("the stop deadline passed",))
        self._timer.daemon = True
        self._timer.start()
        self.request()

    def _force(self, reason: str) -> None:
        log.error("%s: ending at once", reason)
        for action in self.at_force:
            action()
        os._exit(ExitCode.FORCED)


async def close_card(session: CardSession, timeout_s: float) -> None:
    """End the run in order, or leave it to the next one to recover."""
    try:
        async with asyncio.timeout(timeout_s):
            if await session.stop():
                log.info("the card is clean")
    except (TimeoutError, CardLost, CardFailed, DeviceError) as error:
        log.warning(
            "the card could not be closed in order; the next start recovers it (%s)", str(error) or "no time"
        )
