"""Tells systemd how the gateway is (sd_notify(3)). Without NOTIFY_SOCKET it tells nobody; what cannot be sent is not retried."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)

STATUS_CHARACTERS_MAX: Final = 512
US_PER_S: Final = 1_000_000
NS_PER_US: Final = 1_000


class Notifier:
    """Speaks to the service manager that started this process.

    Args:
        environment: of the process.
        clock: monotonic nanoseconds.
    """

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], int]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # An abstract name is written with @ and begins with NUL.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._clock = clock
        self._status = ""
        self._failed = False
        self.listens = bool(self._address)
        """Whether there is anybody to tell."""
        self.watchdog_s = _watchdog_s(environment)
        """Longest pause between two signs of life; 0: none are expected."""

    def ready(self) -> None:
        """Everything answers (again, after a reload)."""
        self._send("READY=1")

    def starting(self, within_s: float) -> None:
        """The start goes on, however long it has taken: the next word comes within that time."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(within_s * US_PER_S)}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={self._clock() // NS_PER_US}")

    def stopping(self) -> None:
        """The end begins."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Feed the watchdog; call it from the loop that serves and from nowhere else."""
        if self.watchdog_s:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Say in one line how it is; what has been said already is not said again."""
        line = " ".join(text.split())[:STATUS_CHARACTERS_MAX]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def _send(self, *lines: str) -> None:
        if not self._address.startswith(("/", "\0")):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            try:
                channel.sendto("\n".join(lines).encode(), self._address)
                self._failed = False
            except OSError as error:
                if not self._failed:
                    log.warning("the service manager cannot be told: %s", error.strerror)
                self._failed = True


def _watchdog_s(environment: Mapping[str, str]) -> float:
    with contextlib.suppress(ValueError):
        if int(environment.get("WATCHDOG_PID", os.getpid())) == os.getpid():
            return max(0, int(environment.get("WATCHDOG_USEC", 0))) / US_PER_S
    return 0.0
