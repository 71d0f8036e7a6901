"""What an admin request can be answered instead of what it asked for: one class, one table, always JSON."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.responses import JSONResponse

from xkv_gateway.card.administration import (
    AdministrationError,
    BadTenant,
    NameTaken,
    TooManyTenants,
)
from xkv_gateway.card.store import CardOffline, CardRecovering, JournalFull

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response


class Problem(Exception):  # noqa: N818 - what the client gets, whosever fault it is
    """A request that is refused; nothing was changed.

    The text never repeats what the request said: that may be a salt.
    """

    def __init__(self, status: HTTPStatus, code: str, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field


def bad_field(field: str, message: str) -> Problem:
    """Return the refusal of a value that cannot be: 422."""
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "bad_value", f"{field}: {message}", field=field)


def not_found(message: str) -> Problem:
    """Return the refusal of a name that means nothing here: 404."""
    return Problem(HTTPStatus.NOT_FOUND, "not_found", message)


def error_response(
    status: int,
    message: str,
    *,
    code: str | None = None,
    field: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return an error as JSON: a code (by default that of the HTTP status), a sentence, and the field if there is one."""
    body = {"code": code or HTTPStatus(status).name.lower(), "message": message}
    if field is not None:
        body["field"] = field
    return JSONResponse({"error": body}, status_code=status, headers=headers)


RETRY: Final = {"retry-after": "1"}
CARD_ANSWERS: Final[dict[type[Exception], tuple[str, str]]] = {
    CardOffline: ("card_offline", "the card cannot be reached; nothing was changed"),
    CardRecovering: (
        "recovering",
        "the run before may still write to the card: nothing may be changed yet, and nothing was",
    ),
    JournalFull: ("busy", "the journal is being relieved by a checkpoint; nothing was changed"),
}
"""All of them 503, to be tried again."""
REFUSALS: Final[dict[type[AdministrationError], HTTPStatus]] = {
    NameTaken: HTTPStatus.CONFLICT,
    BadTenant: HTTPStatus.UNPROCESSABLE_ENTITY,
    TooManyTenants: HTTPStatus.INSUFFICIENT_STORAGE,
}


async def answer_problem(_: Request, error: Exception) -> Response:
    """Answer a refused request."""
    assert isinstance(error, Problem)
    return error_response(error.status, str(error), code=error.code, field=error.field)


async def answer_refusal(_: Request, error: Exception) -> Response:
    """Answer what the card's administration refused."""
    assert isinstance(error, AdministrationError)
    status = REFUSALS.get(type(error), HTTPStatus.CONFLICT)
    field = error.field if isinstance(error, BadTenant) else None
    return error_response(status, str(error), code=error.code, field=field)


async def answer_card(_: Request, error: Exception) -> Response:
    """Answer a change that the card cannot take now."""
    code, message = CARD_ANSWERS[type(error)]
    return error_response(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=RETRY)
