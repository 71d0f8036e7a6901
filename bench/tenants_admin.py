"""The admin port, as the parts about tenants need it."""

from __future__ import annotations

import http.client
import json
from typing import Any

from bench.harness import BenchError


class Admin:
    """Asks the admin port on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port

    def page(self, path: str, method: str = "GET", body: str | None = None) -> bytes:
        """The body of an answer that is a success; anything else ends the part."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status // 100 != 2:
                raise BenchError(f"{method} {path} was answered {answer.status}: {content!r}")
            return content
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: str | None = None) -> Any:
        """The answer, decoded."""
        return json.loads(self.page(path, method, body))

    def set_tenant(self, number: int, scope: bytes, limit_bytes: int) -> None:
        """Name a scope and set its quota."""
        body = json.dumps({"scope": scope.hex(), "limit_bytes": limit_bytes})
        self.ask("PUT", f"/v1/tenants/t{number}", body)

    def count(self, name: str) -> int:
        """One of the engine's counters."""
        count: int = self.ask("GET", "/v1/status")["cache"][name]
        return count
