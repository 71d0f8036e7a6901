"""Why a request is refused: one table of codes, and one exception that carries everything the answer needs."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final


class Code(StrEnum):
    """Machine-readable reasons; `STATUS` gives each its HTTP status."""

    BAD_FRAMING = "bad_framing"
    HEADERS_TOO_LARGE = "headers_too_large"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    TOO_LARGE = "too_large"
    BODY_TIMEOUT = "body_timeout"
    INVALID_JSON = "invalid_json"
    INVALID_FIELD = "invalid_field"
    UNKNOWN_FIELD = "unknown_field"
    REFUSED_FIELD = "refused_field"
    MEDIA_REFUSED = "media_refused"
    SCOPE_REQUIRED = "scope_required"
    RATE_LIMITED = "rate_limited"
    TOO_MANY_REQUESTS = "too_many_requests"
    NOT_ENFORCEABLE = "not_enforceable"
    AUTH_UNAVAILABLE = "auth_unavailable"
    DRAINING = "draining"
    BUSY = "busy"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    INTERNAL = "internal"


STATUS: Final[dict[Code, int]] = {
    Code.BAD_FRAMING: 400,
    Code.HEADERS_TOO_LARGE: 431,
    Code.NOT_FOUND: 404,
    Code.METHOD_NOT_ALLOWED: 405,
    Code.UNAUTHORIZED: 401,
    Code.FORBIDDEN: 403,
    Code.UNSUPPORTED_MEDIA_TYPE: 415,
    Code.TOO_LARGE: 413,
    Code.BODY_TIMEOUT: 408,
    Code.INVALID_JSON: 400,
    Code.INVALID_FIELD: 400,
    Code.UNKNOWN_FIELD: 400,
    Code.REFUSED_FIELD: 400,
    Code.MEDIA_REFUSED: 400,
    Code.SCOPE_REQUIRED: 400,
    Code.RATE_LIMITED: 429,
    Code.TOO_MANY_REQUESTS: 429,
    Code.NOT_ENFORCEABLE: 501,
    Code.AUTH_UNAVAILABLE: 503,
    Code.DRAINING: 503,
    Code.BUSY: 503,
    Code.UPSTREAM_UNREACHABLE: 502,
    Code.UPSTREAM_FAILED: 502,
    Code.UPSTREAM_TIMEOUT: 504,
    Code.INTERNAL: 500,
}


_CHALLENGE: Final = ((b"www-authenticate", b"Bearer"),)


class Refusal(Exception):  # noqa: N818 - an answer, not an error of ours
    """The request ends here with an answer of ours.

    The text never contains what the client sent except names of fields, and never a secret or an internal address.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.headers = headers

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return STATUS[self.code]

    def body(self) -> dict[str, Any]:
        """Return the JSON body, in the shape that clients of this kind of API expect."""
        error: dict[str, Any] = {"message": self.message, "type": "xkv_frontend", "code": self.code.value}
        if self.field is not None:
            error["param"] = self.field
        return {"error": error}


def unauthorized() -> Refusal:
    """Return the one answer to everybody who is not known: it does not say what was wrong."""
    return Refusal(Code.UNAUTHORIZED, "a valid API key is needed", headers=_CHALLENGE)


def retry_after(seconds: float) -> tuple[tuple[bytes, bytes], ...]:
    """Return the Retry-After header for a wait of `seconds`, rounded up to at least one second."""
    return ((b"retry-after", str(max(1, -int(-seconds // 1))).encode()),)
