"""What the ports answer while the start waits for a card that nobody answers for: misses, and that there is no card yet."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.responses import JSONResponse, Response

from xkv_gateway.core.types import LoadStatus
from xkv_gateway.service.control import views_of
from xkv_gateway.service.metric_status import readiness_families
from xkv_gateway.service.metrics import CONTENT_TYPE, family_text
from xkv_gateway.service.problems import RETRY, error_response
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from xkv_gateway.service.control import Regions
    from xkv_rpc.calls import Call

RETRY_AFTER_MS: Final = 1000


class NoCardYet:
    """Answers the control port: lookups and loads miss at once, everything that needs a card is `card_offline`.

    Args:
        regions: the regions that clients have attached.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def handle(self, call: Call) -> None:
        """Take a request (see `xkv_rpc.calls.Handler`)."""
        request = call.request
        match request:
            case m.Ping():
                call.reply(m.PingReply())
            case m.Lookup():
                each = request.mode is m.LookupMode.EACH
                call.reply(m.LookupReply(0, [None] * len(request.keys) if each else []))
            case m.Load():
                try:
                    self._zero(request)
                except RpcError as error:
                    call.fail(error)
                    return
                call.reply(
                    m.LoadReply([LoadStatus.MISS.value] * len(request.keys), [None] * len(request.keys))
                )
            case _:
                message = "the gateway has started and waits for its card; try again later"
                call.fail(RpcError(ErrorCode.CARD_OFFLINE, message, retry_after_ms=RETRY_AFTER_MS))

    def _zero(self, request: m.Load) -> None:
        """Zero the ranges of a load, as where nothing was found."""
        if request.region is None:
            return
        region = self._regions.find(request.region)
        if region is None:
            raise RpcError(
                ErrorCode.UNKNOWN_REGION, "no such region: its connection was closed", field="region"
            )
        for view in views_of(region, request.offsets, request.lengths):
            view[:] = bytes(len(view))
            view.release()


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
