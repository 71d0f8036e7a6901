"""Why a value was refused, in words that need no knowledge of the validator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WORDS: Final = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text in quotes",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "too_long": "must have at most {max_length} items",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "extra_forbidden": "is not known here",
    "missing": "is missing",
    "value_error": "{error}",
}


def reason_of(details: ErrorDetails) -> str:
    """Return why a value was refused, in words."""
    words = _WORDS.get(details["type"])
    return details["msg"] if words is None else words.format(**details.get("ctx", {}))
