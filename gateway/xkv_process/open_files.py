"""How many files and connections a process may have open."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from xkv_process.errors import CommandError

OPEN_FILES_LEAST: Final = 64
"""Ports, the card and a few clients."""
OPEN_FILES_MOST: Final = 65_536


def open_files_allowed() -> int:
    """Return how many files and connections a gateway may have open: what it may allow itself counts."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return OPEN_FILES_MOST if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MOST)


def allow_open_files(refused: type[CommandError]) -> None:
    """Allow this process as many open files and connections as it may allow itself.

    Raises:
        CommandError: `refused`: they are too few for anything.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = open_files_allowed()
    if allowed < OPEN_FILES_LEAST:
        raise refused(
            f"the limit of open files (RLIMIT_NOFILE) is {allowed}: at least {OPEN_FILES_LEAST} are needed",
            advice="Raise it: LimitNOFILE=65536 in the unit, or `ulimit -n`.",
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
