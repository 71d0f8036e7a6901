"""Names in admin paths: decoded strictly from the bytes that were sent, so that no two paths mean one name. Pure.

salt         PUT /quota/{cache_salt}: becomes a scope at once, and is gone
scope:HEX    that scope
_default     the empty scope, or the empty namespace
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote_to_bytes

from xkv_gateway.core.tenancy import TENANT_NAME_BYTES_MAX
from xkv_gateway.service.bodies import scope_from_hex
from xkv_gateway.service.problems import Problem, bad_field, not_found
from xkv_rpc import scope_of
from xkv_rpc.messages import DEFAULT_NAME, NAMESPACE_BYTES_MAX

SCOPE_PREFIX: Final = "scope:"
RESERVED: Final = frozenset({DEFAULT_NAME, "other", ".", ".."})
"""`other` is the label of all tenants without a name; clients fold `.` and `..` away."""
_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9a-fA-F]{2})")


def path_tail(raw_path: bytes, segments: int) -> str:
    """Return what stands behind the first `segments` segments of a path, percent-decoded once; it may have slashes.

    Raises:
        Problem: 404 where nothing stands there, 400 where it is not percent-encoded UTF-8.
    """
    parts = raw_path.split(b"/", segments + 1)
    if len(parts) < segments + 2 or not parts[-1]:
        raise not_found("the path ends where a name is expected")
    if _BAD_ESCAPE.search(parts[-1]):
        raise Problem(
            HTTPStatus.BAD_REQUEST, "bad_path", "the path has a % that no two hexadecimal digits follow"
        )
    try:
        return unquote_to_bytes(parts[-1]).decode()
    except UnicodeDecodeError:
        # The decoder's error carries the bytes, which may be a salt: it is not chained.
        raise Problem(HTTPStatus.BAD_REQUEST, "bad_path", "the path is not UTF-8") from None


def scope_in_path(text: str) -> bytes:
    """Return the scope that a name in a quota path means: `_default`, `scope:HEX`, else a salt.

    Raises:
        Problem: 422.
    """
    if text == DEFAULT_NAME:
        return b""
    scope = registered_scope(text)
    if scope is not None:
        return scope
    try:
        return scope_of(text)
    except ValueError as error:
        raise bad_field("cache_salt", str(error)) from None


def registered_scope(text: str) -> bytes | None:
    """Return the scope that `scope:HEX` means, None where `text` is not of that form. Raises Problem: 422."""
    if not text.startswith(SCOPE_PREFIX):
        return None
    digits = text.removeprefix(SCOPE_PREFIX)
    if not digits or digits == DEFAULT_NAME:
        raise bad_field("scope", f"the empty scope is written {DEFAULT_NAME}")
    return scope_from_hex(digits)


def scope_name(scope: bytes) -> str:
    """Return how a scope is written where a name stands."""
    return f"{SCOPE_PREFIX}{scope.hex()}" if scope else DEFAULT_NAME


def namespace_in_path(text: str) -> str:
    """Return the namespace that a name in a path means. Raises Problem: 422."""
    if text == DEFAULT_NAME:
        return ""
    if len(text.encode()) > NAMESPACE_BYTES_MAX:
        raise bad_field("namespace", f"has more than {NAMESPACE_BYTES_MAX} bytes")
    return text


def namespace_name(namespace: str) -> str:
    """Return how a namespace is written where a name stands."""
    return namespace or DEFAULT_NAME


def tenant_name(text: str) -> str:
    """Return the name of a tenant: 1 to 64 bytes of printable text that means nothing else, in a path or a metric.

    Raises:
        Problem: 422.
    """
    if text in RESERVED or "/" in text or text.startswith(SCOPE_PREFIX):
        raise bad_field("name", "this means something else: it is reserved, or has a slash")
    if not text.isprintable() or len(text.encode()) > TENANT_NAME_BYTES_MAX or text != text.strip():
        raise bad_field("name", f"must be 1 to {TENANT_NAME_BYTES_MAX} bytes of printable text")
    return text
