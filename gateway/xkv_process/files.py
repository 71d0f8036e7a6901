"""Files that somebody names to us."""

from __future__ import annotations

import errno
import os
import stat


def regular_only(path: str, flags: int) -> int:
    """Open a file; for `open(..., opener=)`. A pipe, which would keep us until somebody writes to it, or a device is refused.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    # A directory is told by who opens it.
    if stat.S_IFMT(os.fstat(descriptor).st_mode) in {stat.S_IFREG, stat.S_IFDIR}:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", path)
