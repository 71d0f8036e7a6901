"""systemd's journal in its own protocol: a record is one entry, and its facts are fields (systemd.journal-fields(7)).

`journalctl XKV_EVENT=card` then finds what `log.format = "json"` says as `"event": "card"`.
"""

from __future__ import annotations

import logging
import re
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PREFIX: Final = "XKV_"
"""Of the fields that are a record's own facts."""
FIELD_CHARACTERS_MAX: Final = 64
"""The journal drops entries' fields with longer names."""
_OUTSIDE: Final = re.compile(r"[^A-Z0-9_]")


def entry(fields: Mapping[str, object]) -> bytes:
    """Return the datagram of an entry; a value of several lines is written with its length."""
    parts = bytearray()
    for name, value in fields.items():
        key, content = name.encode(), str(value).encode(errors="replace")
        if b"\n" in content:
            parts += key + b"\n" + struct.pack("<Q", len(content)) + content + b"\n"
        else:
            parts += key + b"=" + content + b"\n"
    return bytes(parts)


def field_name(fact: str) -> str:
    """Return the field that a fact of a record becomes."""
    return (PREFIX + _OUTSIDE.sub("_", fact.upper()))[:FIELD_CHARACTERS_MAX]


class JournalHandler(logging.Handler):
    """Sends each record as an entry; what the journal does not take goes to another handler, which never blocks on it.

    Args:
        path: the journal's socket.
        identifier: who says it.
        facts: the facts of a record.
        priority: the severity of a level, as the journal counts.
        fallback: for what cannot be sent: the journal is away or full, or the entry is too long for a datagram.
    """

    def __init__(
        self,
        path: Path,
        identifier: str,
        *,
        facts: Callable[[logging.LogRecord], Mapping[str, object]],
        priority: Callable[[int], int],
        fallback: logging.Handler,
    ) -> None:
        super().__init__()
        self._path = str(path)
        self._identifier = identifier
        self._facts = facts
        self._priority = priority
        self._fallback = fallback
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Send it."""
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": self._priority(record.levelno),
            "SYSLOG_IDENTIFIER": self._identifier,
            "LOGGER": record.name,
            **{field_name(name): value for name, value in self._facts(record).items()},
        }
        try:
            self._socket.sendto(entry(fields), self._path)
        except OSError:
            self._fallback.emit(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()
