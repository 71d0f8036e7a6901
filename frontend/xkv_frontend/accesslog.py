"""The access log: one JSON object a line for each request. Names and numbers only: no key, salt, header, path or text of a client."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_frontend.clock import Clock
    from xkv_frontend.exchange import Exchange

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


class AccessLog:
    """Writes lines to `write_line`; None switches it off."""

    def __init__(self, write_line: Callable[[str], Any] | None, wall_clock: Clock) -> None:
        self._write_line = write_line
        self._wall_clock = wall_clock

    def write(self, exchange: Exchange, method: str, now_ns: int) -> None:
        """Write the line of a request that has ended."""
        if self._write_line is None:
            return
        identity = exchange.identity
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(self._wall_clock() / 1e9, UTC).isoformat(timespec="milliseconds"),
            "request_id": exchange.id,
            "tenant": identity.tenant if identity else None,
            "credential": identity.credential if identity else None,
            "method": method if method in METHODS else "other",
            "route": exchange.route.name.value if exchange.route else None,
            "scope": exchange.scope or None,
            "stream": exchange.stream,
            "status": exchange.status or None,
            "outcome": exchange.outcome.value,
            "code": exchange.code or None,
            "received_bytes": exchange.received_bytes,
            "sent_bytes": exchange.sent_bytes,
            "first_byte_ms": None
            if exchange.first_ns is None
            else _ms(exchange.first_ns - exchange.began_ns),
            "duration_ms": _ms(now_ns - exchange.began_ns),
        }
        self._write_line(json.dumps(line))


def _ms(ns: int) -> float:
    return round(ns / 1e6, 2)
