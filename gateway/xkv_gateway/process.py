"""The process that a command runs in: its standard streams, how much it may open, and signals before anybody listens."""

from __future__ import annotations

import io
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from types import FrameType

STANDARD: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""The standard streams in the order of their descriptors."""
OPEN_FILES_LEAST: Final = 64
"""Ports, the card and a few clients."""
OPEN_FILES_MOST: Final = 65_536


def open_standard_streams() -> None:
    """Put /dev/null where a standard descriptor is closed: else a socket or a file of ours would get its number.

    What the encoding of standard output has no character for is escaped, as Python does it on standard error.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(STANDARD):
        os.set_inheritable(descriptor, True)
        name, mode = STANDARD[descriptor]
        setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def lost_output() -> str:
    """Say why standard output cannot be written; empty: it can.

    What it holds is let go then: Python would try again at the end, and end with a status of its own.
    """
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return os.strerror(error.errno or 0)
    return ""


def let_go_of_output() -> None:
    """Forget what the standard streams hold and cannot write: Python would try again at the end, and end with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_at_once_on_signals() -> None:
    """Let SIGINT and SIGTERM end the process in order for as long as nobody else listens to them.

    That is until there is a loop, and there is nothing to clean up before it, nor after it. Nor is there anything that SIGHUP
    could have read again.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
    os._exit(ExitCode.OK)


def open_files_allowed() -> int:
    """Return how many files and connections a gateway may have open: what it may allow itself counts."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return OPEN_FILES_MOST if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MOST)


def allow_open_files() -> None:
    """Allow this process as many open files and connections as it may allow itself.

    Raises:
        ConfigError: They are too few for anything.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = open_files_allowed()
    if allowed < OPEN_FILES_LEAST:
        raise ConfigError(
            f"the limit of open files (RLIMIT_NOFILE) is {allowed}: at least {OPEN_FILES_LEAST} are needed",
            advice="Raise it: LimitNOFILE=65536 in the unit, or `ulimit -n`.",
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
