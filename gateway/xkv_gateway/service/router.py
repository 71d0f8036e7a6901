"""Makes the routing table of the admin port from the table of endpoints and the objects that have the handlers."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

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
    Names = tuple[str, ...]

QUERY_FIELDS_MAX: Final = 8


class _Rest(PathConvertor):
    """The rest of a path, whatever is in it: starlette's own takes no line feed."""

    regex = "(?s:.*)"


register_url_convertor("rest", _Rest())


def build_routes(*handlers: object) -> list[Route]:
    """Return a route for each path of the table whose handlers are there; another method is 405 and says which there are."""
    paths: dict[str, dict[str, tuple[Handler, Names]]] = {}
    for endpoint in ENDPOINTS:
        for candidate in handlers:
            handler = getattr(candidate, endpoint.handler, None)
            if handler is not None:
                known = tuple(query.name for query in endpoint.query)
                paths.setdefault(endpoint.path, {})[endpoint.method] = (handler, known)
    # What is more special comes first: a name in braces takes the rest of the path.
    return [
        Route(path.replace("}", ":rest}"), _dispatcher(methods), methods=list(methods))
        for path, methods in sorted(paths.items(), key=lambda item: "{" in item[0])
    ]


def _dispatcher(methods: Mapping[str, tuple[Handler, Names]]) -> Handler:
    async def dispatch(request: Request) -> Response:
        handler, known = methods["GET" if request.method == "HEAD" else request.method]
        request.state.query = _query(request, known)
        return await handler(request)

    return dispatch


def _query(request: Request, known: Names) -> dict[str, str]:
    """Return the query parameters. One that is unknown or stands twice is refused: it may be a misspelled limit of a wipe.

    The refusal does not repeat it: what was put into a URL by mistake may be a salt.
    """
    raw: bytes = request.scope["query_string"]
    if not raw:
        return {}
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=QUERY_FIELDS_MAX,
        )
    except ValueError:
        raise Problem(HTTPStatus.BAD_REQUEST, "bad_query", "the query cannot be read") from None
    found = dict(pairs)
    if len(found) != len(pairs) or not found.keys() <= set(known):
        names = ", ".join(known) or "none"
        message = f"a query parameter is unknown, or stands twice; there are: {names}"
        raise Problem(HTTPStatus.BAD_REQUEST, "bad_query", message)
    return found


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client went away in the middle of its body: nobody reads this."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


def exception_handlers() -> dict[Any, Any]:
    """Return who answers what handlers raise."""
    return {
        Problem: answer_problem,
        AdministrationError: answer_refusal,
        **dict.fromkeys(CARD_ANSWERS, answer_card),
        ClientDisconnect: _answer_nobody,
    }
