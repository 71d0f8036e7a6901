"""The standard streams: closed, full, or with an encoding that lacks characters."""

from __future__ import annotations

import io
import os
import sys
from typing import Final

STANDARD: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
"""The standard streams in the order of their descriptors."""


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
