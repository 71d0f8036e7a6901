"""What the ports answer while the start waits for a card that nobody answers for: misses, and that there is no card yet."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, assert_never

from starlette.responses import JSONResponse, Response

from xkv_gateway.core.errors import UnknownLease, UnknownTicket
from xkv_gateway.core.types import LoadStatus
from xkv_gateway.service.control import views_of
from xkv_gateway.service.metric_status import readiness_families
from xkv_gateway.service.metrics import CONTENT_TYPE, family_text
from xkv_gateway.service.problems import RETRY, error_response
from xkv_gateway.service.refusals import refusal_of
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from xkv_gateway.service.control import Regions
    from xkv_gateway.service.meter import Meter
    from xkv_rpc.calls import Call

RETRY_AFTER_MS: Final = 1000


class NoCardYet:
    """Answers the control port as the service does whose card is offline: lookups and loads miss at once, what writes is refused.

    Args:
        hello: makes the reply to `hello`.
        regions: the regions that clients have attached.
        meter: counts what is done.
        clock: monotonic ns.
    """

    def __init__(
        self, hello: Callable[[], m.HelloReply], regions: Regions, meter: Meter, clock: Callable[[], int]
    ) -> None:
        self._hello = hello
        self._regions = regions
        self._meter = meter
        self._clock = clock

    def handle(self, call: Call) -> None:
        """Take a request (see `xkv_rpc.calls.Handler`)."""
        request = call.request
        try:
            match request:
                case m.Hello():
                    call.reply(self._hello())
                    # A client says it once on a connection, and is counted under it when the card has come.
                    self._meter.hello(call.peer, request)
                    return
                case m.Ping():
                    call.reply(m.PingReply())
                    return
                case m.Lookup():
                    each = request.mode is m.LookupMode.EACH
                    missed = m.LookupReply(0, [None] * len(request.keys) if each else [])
                    call.reply(replace(missed, extents=[], checksums=[]) if request.extents else missed)
                    self._meter.lookup(call, request, 0, self._clock())
                    return
                case m.Load():
                    self._zero(request)
                    nothing = [LoadStatus.MISS.value] * len(request.keys)
                    call.reply(m.LoadReply(nothing, [None] * len(request.keys)))
                case m.Store():
                    self._views(request.region, request.offsets, request.sizes)
                    raise _no_card()
                case m.Delete() | m.Reserve():
                    raise _no_card()
                case m.Renew() | m.Release():
                    # None was granted by this run, and those of the run before ended with it.
                    raise refusal_of(UnknownLease())
                case m.Commit() | m.Abort():
                    raise refusal_of(UnknownTicket())
                case _:
                    assert_never(request)
        except RpcError as error:
            call.fail(error)
        self._meter.took(call, self._clock())

    def _views(self, token: bytes | None, offsets: list[int], lengths: list[int]) -> list[memoryview]:
        """Return those ranges of a region, none where none is named. Raises RpcError."""
        return [] if token is None else views_of(self._regions.find(token), offsets, lengths)

    def _zero(self, request: m.Load) -> None:
        """Zero the ranges of a load, as where nothing was found."""
        for view in self._views(request.region, request.offsets, request.lengths):
            view[:] = bytes(len(view))


def _no_card() -> RpcError:
    message = "the gateway has started and has no card yet; try again later"
    return RpcError(ErrorCode.CARD_OFFLINE, message, retry_after_ms=RETRY_AFTER_MS)


class NoCardYetApp:
    """Answers the admin port: the process is well, and nothing else can be said yet.

    Args:
        reason: gives why there is no card.
    """

    def __init__(self, reason: Callable[[], str]) -> None:
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        if scope["type"] != "http":
            return
        answers = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        response = answers.get(scope["path"], self._not_yet)()
        await response(scope, receive, send)

    def _healthz(self) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    def _readyz(self) -> JSONResponse:
        body = {"status": "not ready", "card": "offline", "reason": f"waiting for the card: {self._reason()}"}
        return JSONResponse(body, status_code=HTTPStatus.SERVICE_UNAVAILABLE)

    def _metrics(self) -> Response:
        text = "".join(family_text(family) for family in readiness_families("offline", ready=False))
        return Response(text, media_type=CONTENT_TYPE)

    def _not_yet(self) -> JSONResponse:
        message = f"the gateway has started and waits for its card: {self._reason()}"
        return error_response(
            HTTPStatus.SERVICE_UNAVAILABLE, message, code=ErrorCode.CARD_OFFLINE.value, headers=RETRY
        )
