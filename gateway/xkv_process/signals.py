"""Signals: before anybody listens to them, and while a loop does."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType


def end_at_once_on_signals() -> None:
    """Let SIGINT and SIGTERM end the process in order for as long as nobody else listens to them.

    That is until there is a loop, and there is nothing to clean up before it, nor after it. Nor is there anything that SIGHUP
    could have read again.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
    os._exit(os.EX_OK)


@contextlib.contextmanager
def listening(
    loop: asyncio.AbstractEventLoop, handlers: Mapping[signal.Signals, Callable[[], None]]
) -> Iterator[None]:
    """Have the loop call these inside the block; behind it the signals mean what they meant before."""
    before = [(number, signal.getsignal(number)) for number in handlers]
    for number, listen in handlers.items():
        loop.add_signal_handler(number, listen)
    try:
        yield
    finally:
        for number, handler in before:
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
