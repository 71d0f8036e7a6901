"""Heads of requests and replies: what is read from them, and the short lists of what is passed on.

Nothing that a client wrote decides the framing of the request to the upstream: that is built here from nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from xkv_frontend.core.refusal import Code, Refusal, unauthorized

Headers = Iterable[tuple[bytes, bytes]]

HEADERS_MAX: Final = 100
HEADER_BYTES_MAX: Final = 32 << 10
_SINGLE: Final = frozenset(
    {b"authorization", b"content-length", b"content-type", b"host", b"transfer-encoding", b"expect"}
)
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_JSON_TYPE: Final = re.compile(
    rb"application/json[ \t]*(?:;[ \t]*charset[ \t]*=[ \t]*\"?utf-8\"?[ \t]*;?[ \t]*)?", re.IGNORECASE
)
_ACCEPT: Final = re.compile(rb"[A-Za-z0-9*/+.;=, -]{1,256}")

NO_CONTENT: Final = 204
"""Such an answer has no body, and may not tell a length (RFC 9110, 8.6)."""
REPLY_HEADERS: Final = frozenset(
    {b"content-type", b"content-length", b"content-encoding", b"cache-control", b"retry-after"}
)
"""Headers of the upstream's reply that the client sees."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the headers of a request say."""

    length: int | None
    """Bytes of the body as announced; None: chunked, or none."""
    chunked: bool
    expects_continue: bool
    accept: bytes | None
    content_type: bytes | None
    encoded: bool

    @property
    def has_body(self) -> bool:
        """Whether a body follows."""
        return self.chunked or bool(self.length)


def read_head(headers: Headers) -> Head:
    """Return what matters of the headers (names in lower case).

    Raises:
        Refusal: `headers_too_large`; `unauthorized`: two keys; or `bad_framing`: a header twice that may stand once, two framings at once, a length that
            is not a number.
    """
    found: dict[bytes, bytes] = {}
    count = size = 0
    for name, value in headers:
        count += 1
        size += len(name) + len(value)
        if name in _SINGLE and name in found:
            if name == b"authorization":
                raise unauthorized()
            raise Refusal(Code.BAD_FRAMING, "a header stands twice that may stand once")
        found[name] = value
    if count > HEADERS_MAX or size > HEADER_BYTES_MAX:
        raise Refusal(
            Code.HEADERS_TOO_LARGE, f"at most {HEADERS_MAX} headers with {HEADER_BYTES_MAX} bytes in all"
        )
    length, chunked = found.get(b"content-length"), b"transfer-encoding" in found
    if length is not None and (chunked or not _LENGTH.fullmatch(length)):
        raise Refusal(Code.BAD_FRAMING, "the length of the body is not clear")
    return Head(
        length=None if length is None else int(length),
        chunked=chunked,
        expects_continue=b"expect" in found,
        accept=found.get(b"accept"),
        content_type=found.get(b"content-type"),
        encoded=found.get(b"content-encoding", b"identity").strip().lower() != b"identity",
    )


def check_json_type(head: Head) -> None:
    """Refuse a body that does not say that it is plain JSON in UTF-8.

    Raises:
        Refusal: `unsupported_media_type`.
    """
    if head.encoded or head.content_type is None or not _JSON_TYPE.fullmatch(head.content_type):
        raise Refusal(
            Code.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json in UTF-8, not compressed"
        )


def upstream_headers(
    host: bytes, head: Head, request_id: bytes, body_bytes: int | None, authorization: bytes | None
) -> list[tuple[bytes, bytes]]:
    """Return the headers of the request to the upstream. None of them is the client's, except a plain `accept`."""
    accept = head.accept if head.accept is not None and _ACCEPT.fullmatch(head.accept) else b"*/*"
    headers = [
        (b"host", host),
        (b"accept", accept),
        (b"accept-encoding", b"identity"),
        (b"user-agent", b"xkv-frontend"),
        (b"connection", b"close"),
        (b"x-request-id", request_id),
    ]
    if authorization is not None:
        headers.append((b"authorization", authorization))
    if body_bytes is not None:
        headers += [(b"content-type", b"application/json"), (b"content-length", str(body_bytes).encode())]
    return headers


def reply_headers(status: int, headers: Headers, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Return what of the upstream's headers goes to the client, and the request's id."""
    passed = REPLY_HEADERS - {b"content-length"} if status == NO_CONTENT else REPLY_HEADERS
    kept = [(name.lower(), value) for name, value in headers if name.lower() in passed]
    return [*kept, (b"x-request-id", request_id)]


def bearer(headers: Headers) -> bytes | None:
    """Return the API key of `Authorization: Bearer KEY` or `x-api-key: KEY`.

    None where there is none, more than one, or one with anything around it.
    """
    keys: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            keys.append(key if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key":
            keys.append(value)
    if len(keys) != 1 or not keys[0] or b" " in keys[0] or b"\t" in keys[0]:
        return None
    return keys[0]


def single(headers: Headers, wanted: bytes) -> str | None:
    """Return the value of a header that stands exactly once, None otherwise."""
    values = [value for name, value in headers if name == wanted]
    if len(values) != 1:
        return None
    try:
        return values[0].decode("utf-8")
    except UnicodeDecodeError:
        return None
