"""JSON that has one reading only: what two parsers could take differently is refused, and what remains is written anew."""

from __future__ import annotations

import json
from typing import Any, Final

from xkv_frontend.core.refusal import Code, Refusal

DEPTH_MAX: Final = 64
"""Deepest nesting; the schemas of tools are the deepest that clients send, and stay below 20."""


class _DuplicateError(ValueError):
    pass


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateError
    return found


def _constant(_: str) -> None:
    raise ValueError("not a number of JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_members, parse_constant=_constant)
_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the object that `raw` spells.

    Raises:
        Refusal: `invalid_json`: not UTF-8, a byte order mark, not exactly one value, a member twice, NaN or infinity, nested
            deeper than `DEPTH_MAX`, or not an object.
    """
    try:
        text = raw.decode("utf-8")
        # The decoder takes any one value: `decode` refuses what stands behind it.
        value = _DECODER.decode(text)
    except _DuplicateError:
        raise Refusal(Code.INVALID_JSON, "a member stands twice in one object") from None
    except UnicodeDecodeError:
        raise Refusal(Code.INVALID_JSON, "the body is not UTF-8") from None
    except (ValueError, RecursionError):
        # Also integers of thousands of digits. The decoder's own text would repeat parts of the body.
        raise Refusal(Code.INVALID_JSON, "the body is not one JSON value") from None
    if not isinstance(value, dict):
        raise Refusal(Code.INVALID_JSON, "the body is not a JSON object")
    if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX and _deeper_than(value, DEPTH_MAX):
        raise Refusal(Code.INVALID_JSON, f"the body is nested deeper than {DEPTH_MAX}")
    return value


def _deeper_than(value: Any, depth_max: int) -> bool:
    level: list[Any] = [value]
    for _ in range(depth_max):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(child for child in children if isinstance(child, dict | list))
        if not below:
            return False
        level = below
    return True


def write_object(value: dict[str, Any]) -> bytes:
    """Return `value` as UTF-8 JSON without spaces.

    Raises:
        Refusal: `invalid_json`: half a surrogate pair in a string, or a number beyond a double.
    """
    try:
        return _ENCODER.encode(value).encode("utf-8")
    except ValueError:  # UnicodeEncodeError is one
        message = "the body has a number beyond the range of a double, or a string that is not Unicode"
        raise Refusal(Code.INVALID_JSON, message) from None
