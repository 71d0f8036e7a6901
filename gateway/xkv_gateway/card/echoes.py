"""Writes of the card's own structures whose first sending may still be executed, though they were done again since.

What was sent again with the same bytes is right whichever of the two comes last. It is wrong as soon as other bytes are written there: then
the late one would bring the old ones back. So other bytes wait until it is settled (R4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Echo(NamedTuple):
    offset_bytes: int
    data: bytes
    settles_at_ns: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + len(self.data)


class Echoes:
    """What may still land, and until when."""

    def __init__(self) -> None:
        self._echoes: list[_Echo] = []

    def __bool__(self) -> bool:
        return bool(self._echoes)

    def add(self, offset_bytes: int, buffers: Sequence[bytes | memoryview], settles_at_ns: int) -> None:
        """Note a write that can be executed until `settles_at_ns`."""
        self._echoes.append(_Echo(offset_bytes, b"".join(buffers), settles_at_ns))

    def settled_at_ns(self, offset_bytes: int, buffers: Sequence[bytes | memoryview], now_ns: int) -> int:
        """Return from when on these bytes may be written there; `now_ns`: now. Forgets what has settled."""
        self._echoes = [echo for echo in self._echoes if echo.settles_at_ns > now_ns]
        length_bytes = sum(map(len, buffers))
        near = [
            echo
            for echo in self._echoes
            if echo.offset_bytes < offset_bytes + length_bytes and offset_bytes < echo.end_bytes
        ]
        if not near:
            return now_ns
        data = memoryview(b"".join(buffers))
        return max(
            (echo.settles_at_ns for echo in near if _differs(echo, offset_bytes, data)), default=now_ns
        )


def _differs(echo: _Echo, offset_bytes: int, data: memoryview) -> bool:
    begin, end = max(echo.offset_bytes, offset_bytes), min(echo.end_bytes, offset_bytes + len(data))
    theirs = memoryview(echo.data)[begin - echo.offset_bytes : end - echo.offset_bytes]
    return theirs != data[begin - offset_bytes : end - offset_bytes]
