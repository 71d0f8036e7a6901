"""What the functions that check one body share: the policy, how media are named, and where in the body they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xkv_frontend.core.fields import CONTROL_NAMES
from xkv_frontend.core.policy import UnknownFields
from xkv_frontend.core.refusal import Code, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PATH_CHARACTERS_MAX = 120


@dataclass(frozen=True, slots=True)
class Context:
    """For one request."""

    unknown_fields: UnknownFields
    media_hosts: frozenset[str]
    media_uuid: Callable[[str], str]
    """Turns a client's uuid of media into the scope's own."""

    def members(
        self,
        value: Mapping[str, Any],
        known: frozenset[str],
        path: str,
        dropped: frozenset[str] = frozenset(),
    ) -> Iterator[tuple[str, Any]]:
        """Yield the members of `value` that are in `known`.

        Members in `dropped`, and those that steer the cache, are left out.

        Raises:
            Refusal: `unknown_field`, under the policy `reject`.
        """
        for name, item in value.items():
            if name in known:
                yield name, item
            elif name not in dropped and name not in CONTROL_NAMES:
                self.unknown(f"{path}.{name}" if path else name)

    def unknown(self, path: str) -> None:
        """Refuse a member that no table names, or let it be dropped.

        Raises:
            Refusal: `unknown_field`.
        """
        if self.unknown_fields is UnknownFields.REJECT:
            raise Refusal(Code.UNKNOWN_FIELD, "this field is not known here", field=shown(path))


def shown(path: str) -> str:
    """Return a path as it may stand in an answer: short, printable ASCII."""
    text = path if len(path) <= PATH_CHARACTERS_MAX else path[:PATH_CHARACTERS_MAX] + "..."
    return text.encode("ascii", "backslashreplace").decode("ascii")


def invalid(path: str, message: str) -> Refusal:
    """Return the refusal of a member that is known but not like this."""
    return Refusal(Code.INVALID_FIELD, message, field=shown(path))


def as_list(value: Any, path: str) -> list[Any]:
    """Return `value`, a list.

    Raises:
        Refusal: It is not.
    """
    if not isinstance(value, list):
        raise invalid(path, "must be a list")
    return value


def as_object(value: Any, path: str) -> dict[str, Any]:
    """Return `value`, an object.

    Raises:
        Refusal: It is not.
    """
    if not isinstance(value, dict):
        raise invalid(path, "must be an object")
    return value


def as_text(value: Any, path: str) -> str:
    """Return `value`, a string.

    Raises:
        Refusal: It is not.
    """
    if not isinstance(value, str):
        raise invalid(path, "must be a string")
    return value


def scalar(value: Any, path: str) -> Any:
    """Return `value`: a string, number, boolean or null.

    Raises:
        Refusal: It is a list or an object.
    """
    if isinstance(value, dict | list):
        raise invalid(path, "must be a single value")
    return value


def optional_text(value: Any, path: str) -> str | None:
    """Return `value`: a string or null.

    Raises:
        Refusal: It is not.
    """
    return None if value is None else as_text(value, path)


def without_control(value: Any) -> Any:
    """Return JSON data without the members that steer the cache, however deep they are."""
    if isinstance(value, dict):
        return {name: without_control(item) for name, item in value.items() if name not in CONTROL_NAMES}
    if isinstance(value, list):
        return [without_control(item) for item in value]
    return value
