"""Names that go into a salt: which are allowed, and the scopes that they span.

A `|` separates the parts of what is hashed, so that no part may contain one: with the number of parts fixed by the kind
of the scope, two different lists of names never give the same text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

TenantName = NewType("TenantName", str)
UserName = NewType("UserName", str)
SessionName = NewType("SessionName", str)

NAME_CHARACTERS_MAX: Final = 64
ID_CHARACTERS_MAX: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID: Final = re.compile(r"[^|\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,128}")


class NameRefusedError(ValueError):
    """A name that cannot be part of a salt. The text says which rule it breaks, not what it was."""


class Scope(StrEnum):
    """Who shares a cache. From wide to narrow: the order of the members."""

    NONE = "none"
    """No salt: shared with everybody else who has none."""
    TENANT = "tenant"
    USER = "user"
    SESSION = "session"
    REQUEST = "request"
    """A salt of its own for each request: nothing is ever found again."""


WIDTH: Final[dict[Scope, int]] = {scope: width for width, scope in enumerate(Scope)}
"""Larger is narrower."""


def narrower(first: Scope, second: Scope) -> Scope:
    """Return the narrower of two scopes."""
    return first if WIDTH[first] >= WIDTH[second] else second


@dataclass(frozen=True, slots=True)
class ScopeIds:
    """The names that a scope is made of."""

    tenant: TenantName
    user: UserName | None = None
    session: SessionName | None = None


def tenant_name(text: str) -> TenantName:
    """Return `text` as the name of a tenant.

    Raises:
        NameRefusedError: Not 1 to 64 characters of `A-Z a-z 0-9 . _ -` that begin with a letter or digit.
    """
    return TenantName(_name(text, "a tenant's name"))


def deployment_name(text: str) -> str:
    """Return `text` as the name of a deployment.

    Raises:
        NameRefusedError: As for tenants.
    """
    return _name(text, "a deployment's name")


def _name(text: str, what: str) -> str:
    if not _NAME.fullmatch(text):
        raise NameRefusedError(
            f"{what} is 1 to {NAME_CHARACTERS_MAX} characters of A-Z a-z 0-9 . _ - and begins with a letter or digit"
        )
    return text


def user_name(text: str) -> UserName:
    """Return `text` as the name of a user inside a tenant.

    Raises:
        NameRefusedError: Empty, over 128 characters, or with `|`, a control character or half a surrogate pair.
    """
    return UserName(_id(text, "a user"))


def session_name(text: str) -> SessionName:
    """Return `text` as the name of a session inside a tenant.

    Raises:
        NameRefusedError: As for users.
    """
    return SessionName(_id(text, "a session"))


def _id(text: str, what: str) -> str:
    if not _ID.fullmatch(text):
        raise NameRefusedError(
            f"{what} is named by 1 to {ID_CHARACTERS_MAX} characters without | and control characters"
        )
    return text
