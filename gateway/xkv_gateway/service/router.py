"""Makes the routing table of the admin port from the table of endpoints and the objects that have the handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from xkv_gateway.card.administration import AdministrationError
from xkv_gateway.service.endpoints import ENDPOINTS
from xkv_gateway.service.problems import (
    CARD_ANSWERS,
    Problem,
    answer_card,
    answer_problem,
    answer_refusal,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    Handler = Callable[[Request], Awaitable[Response]]

BAD_REQUEST = 400


class _Rest(PathConvertor):
    """The rest of a path, whatever is in it: starlette's own takes no line feed."""

    regex = "(?s:.*)"


register_url_convertor("rest", _Rest())


def build_routes(*handlers: object) -> list[Route]:
    """Return a route for each path of the table whose handlers are there; another method is 405 and says which there are."""
    paths: dict[str, dict[str, Handler]] = {}
    for endpoint in ENDPOINTS:
        for candidate in handlers:
            handler = getattr(candidate, endpoint.handler, None)
            if handler is not None:
                paths.setdefault(endpoint.path, {})[endpoint.method] = handler
    # What is more special comes first: a name in braces takes the rest of the path.
    return [
        Route(path.replace("}", ":rest}"), _dispatcher(methods), methods=list(methods))
        for path, methods in sorted(paths.items(), key=lambda item: "{" in item[0])
    ]


def _dispatcher(methods: Mapping[str, Handler]) -> Handler:
    async def dispatch(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await methods[method](request)

    return dispatch


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client went away in the middle of its body: nobody reads this."""
    return Response(status_code=BAD_REQUEST)


def exception_handlers() -> dict[Any, Any]:
    """Return who answers what handlers raise."""
    return {
        Problem: answer_problem,
        AdministrationError: answer_refusal,
        **dict.fromkeys(CARD_ANSWERS, answer_card),
        ClientDisconnect: _answer_nobody,
    }
