"""How late the loop is: everything that is served waits for what runs on it, so a pause of the loop is one for all clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD_NS: Final = 5_000_000
"""A pause is seen but for this much of it."""


async def watch_lag(clock: Callable[[], int], tell: Callable[[int], None]) -> None:
    """Ask for a turn again and again, and tell by how many ns it came too late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        turn = loop.create_future()
        asked_ns = clock()
        # A timer of our own: cheaper than `sleep`, and the time is taken where it fires, before anything else runs.
        loop.call_later(PERIOD_NS / 1e9, _fire, turn, clock)
        fired_ns = await turn
        tell(max(0, fired_ns - asked_ns - PERIOD_NS))


def _fire(turn: asyncio.Future[int], clock: Callable[[], int]) -> None:
    if not turn.done():
        turn.set_result(clock())
