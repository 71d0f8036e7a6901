"""The bodies of admin requests, strictly: what two readers could understand differently is refused. Pure.

Numbers with a fraction or an exponent are kept as decimals, so that nothing is rounded before it is judged.
"""

from __future__ import annotations

import json
import re
from decimal import ROUND_FLOOR, Decimal, DecimalException, localcontext
from fractions import Fraction
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from xkv_gateway.core.tenancy import LIMIT_BYTES_MAX, TTL_S_MAX
from xkv_gateway.service.problems import Problem, bad_field
from xkv_rpc.messages import DEFAULT_NAME, SCOPE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Collection

BODY_BYTES_MAX: Final = 4096
GB_BYTES: Final = 1 << 30
"""LMCache's GB."""
DECIMAL_DIGITS: Final = BODY_BYTES_MAX + 64
"""More than any number in a body can have, times GB_BYTES: arithmetic on them is exact."""
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})*", re.ASCII)


def _malformed(message: str) -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, "bad_json", message)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _malformed("a field stands twice in one object")
    return found


def _constant(_: str) -> None:
    raise _malformed("NaN and infinities are not numbers of JSON")


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except DecimalException:
        raise _malformed("a number has an exponent beyond all measure") from None


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_members, parse_constant=_constant, parse_float=_decimal, parse_int=int
)


def parse_body(raw: bytes, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of the object that `raw` spells: all the required ones, and no unknown ones.

    Raises:
        Problem: 400 where it is not one JSON object without repetitions, 413 where it is too large, 422 where a field
            is missing or unknown.
    """
    if len(raw) > BODY_BYTES_MAX:
        raise too_large()
    try:
        value = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise _malformed("the body is not UTF-8") from None
    except (ValueError, RecursionError):
        # The decoder's own text would repeat parts of the body.
        raise _malformed("the body is not one JSON value") from None
    if not isinstance(value, dict):
        raise _malformed("the body is not a JSON object")
    for field in required:
        if field not in value:
            raise bad_field(field, "is missing")
    if not value.keys() <= {*required, *optional}:
        known = ", ".join((*required, *optional))
        raise Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY, "bad_value", f"the body has an unknown field; there are: {known}"
        )
    return value


def seconds_of(value: object, field: str) -> int:
    """Return whole seconds, 0 to TTL_S_MAX. Raises Problem (422)."""
    if type(value) is not int or not 0 <= value <= TTL_S_MAX:
        raise bad_field(field, f"must be an integer from 0 to {TTL_S_MAX}")
    return value


def too_large() -> Problem:
    """Return the refusal of a body beyond BODY_BYTES_MAX."""
    message = f"a body has at most {BODY_BYTES_MAX} bytes"
    return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_large", message)


def limit_from_gb(value: object, field: str = "limit_gb") -> int:
    """Return the bytes of `limit_gb` (2^30 bytes each), rounded down to whole ones.

    Raises:
        Problem: 422: not a number, below 0, or more than 2^63 - 1 bytes.
    """
    if type(value) not in {int, Decimal}:
        raise bad_field(field, "must be a number")
    number = Decimal(value)  # type: ignore[arg-type]  # an int or a Decimal, as just checked
    if number < 0:
        raise bad_field(field, "must not be negative")
    # Compared before it is multiplied: exponents may be anything.
    if number > 1 << 33:
        raise bad_field(field, "is more than 2^63-1 bytes")
    if number.adjusted() < -GB_BYTES.bit_length():
        return 0
    with localcontext(prec=DECIMAL_DIGITS):
        limit_bytes = int((number * GB_BYTES).to_integral_value(ROUND_FLOOR))
    if limit_bytes > LIMIT_BYTES_MAX:
        raise bad_field(field, "is more than 2^63-1 bytes")
    return limit_bytes


def gb_from_limit(limit_bytes: int) -> float:
    """Return the shortest number that `limit_from_gb` turns into `limit_bytes`, so that what was set is what is told.

    Above a PiB a float cannot always tell single bytes.
    """
    exact = Fraction(limit_bytes, GB_BYTES)
    for digits in range(1, 18):
        # The smallest decimal of so many places that is not below.
        scale = 10**digits
        candidate = float(Fraction(-((-exact.numerator * scale) // exact.denominator), scale))
        if int(Fraction(repr(candidate)) * GB_BYTES) == limit_bytes:
            return candidate
    return limit_bytes / GB_BYTES


def limit_bytes_of(value: object, field: str = "limit_bytes") -> int:
    """Return a limit given in bytes.

    Raises:
        Problem: 422: not an integer from 0 to 2^63 - 1.
    """
    if type(value) is not int or not 0 <= value <= LIMIT_BYTES_MAX:
        raise bad_field(field, "must be an integer from 0 to 2^63-1")
    return value


def scope_from_hex(value: object, field: str = "scope") -> bytes:
    """Return the scope that is spelled in hexadecimal; `_default` and nothing are the empty one.

    Raises:
        Problem: 422: not hexadecimal of at most 32 bytes.
    """
    if value == DEFAULT_NAME:
        return b""
    if not isinstance(value, str) or not _HEX.fullmatch(value) or len(value) > 2 * SCOPE_BYTES_MAX:
        # What was given is not repeated: somebody may have taken a salt for a scope.
        raise bad_field(
            field, f"must be a scope in hexadecimal, at most {SCOPE_BYTES_MAX} bytes (never a salt)"
        )
    scope = bytes.fromhex(value)
    if scope == DEFAULT_NAME.encode():
        raise bad_field(field, f"these bytes are reserved: the default scope is written {DEFAULT_NAME}")
    return scope
