"""Server-sent events, read from bytes in any pieces: for the tools that measure, and for knowing whether a stream ended whole.

The proxy itself never parses a stream: it passes bytes.
"""

from __future__ import annotations

from typing import Final

EVENT_BYTES_MAX: Final = 4 << 20


class StreamTooLargeError(ValueError):
    """One event has more than 4 MiB."""


class EventReader:
    """Collects the `data` of events. Lines end with CR, LF or CRLF; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._data: list[bytes] = []
        self._after_cr = False
        self.whole = True
        """Whether the stream could end here: no event is half told."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that `piece` completes.

        Raises:
            StreamTooLargeError: An event is too large.
        """
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if piece.endswith(b"\r"):
            self._after_cr = True
        self._pending += piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = self._pending.split(b"\n")
        self._pending = bytearray(rest)
        events = [event for line in lines if (event := self._line(bytes(line))) is not None]
        if len(rest) + sum(map(len, self._data)) > EVENT_BYTES_MAX:
            raise StreamTooLargeError("an event is too large")
        self.whole = not rest and not self._data
        return events

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
