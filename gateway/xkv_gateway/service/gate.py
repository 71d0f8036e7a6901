"""The control port's front: it is open before the card is, so that a taken port is found before a card is touched.

What arrives early waits, in order, for as long as the start takes. The server bounds how much that can be. Where the start
itself has to wait for a card, somebody stands in who answers at once, from then on until the service is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xkv_rpc.calls import Call, Handler


class Gate:
    """Hands calls to the service, once there is one."""

    def __init__(self) -> None:
        self._service: Handler | None = None
        self._stand_in: Handler | None = None
        self._early: list[Call] = []

    def handle(self, call: Call) -> None:
        """Take a request (see `xkv_rpc.calls.Handler`)."""
        if self._service is not None:
            self._service.handle(call)
        elif self._stand_in is not None:
            self._stand_in.handle(call)
        else:
            self._early.append(call)

    def stand_in(self, service: Handler) -> None:
        """Let somebody answer who has no card until `open`, beginning with what has waited."""
        self._stand_in = service
        self._answer_early(service)

    def open(self, service: Handler) -> None:
        """Serve from now on, beginning with what has waited."""
        assert self._service is None, "a gate opens once"
        self._service = service
        self._answer_early(service)

    def _answer_early(self, service: Handler) -> None:
        early, self._early = self._early, []
        for call in early:
            service.handle(call)
