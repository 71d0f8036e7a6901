"""The control port's front: it is open before the card is, so that a taken port is found before a card is touched.

What arrives early waits, in order, for as long as the start takes. The server bounds how much that can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xkv_rpc.calls import Call, Handler


class Gate:
    """Hands calls to the service, once there is one."""

    def __init__(self) -> None:
        self._service: Handler | None = None
        self._early: list[Call] = []

    def handle(self, call: Call) -> None:
        """Take a request (see `xkv_rpc.calls.Handler`)."""
        if self._service is None:
            self._early.append(call)
        else:
            self._service.handle(call)

    def open(self, service: Handler) -> None:
        """Serve from now on, beginning with what has waited."""
        assert self._service is None, "a gate opens once"
        self._service = service
        early, self._early = self._early, []
        for call in early:
            service.handle(call)
