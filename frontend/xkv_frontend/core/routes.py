"""The routes that reach the upstream: method and exact path, and from which version on the salt is honoured there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from xkv_frontend.core.refusal import Code, Refusal

Version = tuple[int, int]
"""Major and minor."""


class RouteName(StrEnum):
    """Names of the routes, for policies, logs and metrics."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"
    MODELS = "models"


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the allow-list."""

    name: RouteName
    method: str
    path: bytes
    has_body: bool = True
    ask_version: Version | None = None
    """The first version of vLLM that is known to honour the salt here. None: every version that this front end supports."""
    carries_store: bool = True
    """Whether vLLM takes `kv_transfer_params` here, so that `xkv_store` can be said."""


ROUTES: Final[tuple[Route, ...]] = (
    Route(RouteName.CHAT, "POST", b"/v1/chat/completions"),
    Route(RouteName.COMPLETIONS, "POST", b"/v1/completions"),
    Route(RouteName.RESPONSES, "POST", b"/v1/responses", carries_store=False),
    Route(RouteName.MESSAGES, "POST", b"/v1/messages", ask_version=(0, 32)),
    Route(RouteName.EMBEDDINGS, "POST", b"/v1/embeddings", ask_version=(0, 32), carries_store=False),
    Route(RouteName.POOLING, "POST", b"/pooling", ask_version=(0, 32), carries_store=False),
    Route(RouteName.MODELS, "GET", b"/v1/models", has_body=False),
)
VERSION_MIN: Final[Version] = (0, 11)
"""The oldest vLLM that honours the salt on chat completions, completions and responses."""

_BY_PATH: Final[dict[bytes, Route]] = {route.path: route for route in ROUTES}
_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:[.+a-z-].*)?", re.ASCII)


def find_route(method: str, raw_path: bytes, off: frozenset[RouteName] = frozenset()) -> Route:
    """Return the row for a request line; the path is compared as it came, byte by byte.

    Raises:
        Refusal: `not_found` or `method_not_allowed`.
    """
    route = _BY_PATH.get(raw_path)
    if route is None or route.name in off:
        raise Refusal(Code.NOT_FOUND, "there is no such route")
    if method != route.method:
        allow = ((b"allow", route.method.encode()),)
        raise Refusal(Code.METHOD_NOT_ALLOWED, f"this route takes {route.method} only", headers=allow)
    return route


def parse_version(text: str) -> Version | None:
    """Return (major, minor) of a version of vLLM, None where it is not one."""
    found = _VERSION.fullmatch(text.strip())
    return (int(found[1]), int(found[2])) if found else None


def check_version(route: Route, version: Version | None) -> None:
    """Refuse what the running vLLM is not known to salt.

    Raises:
        Refusal: `not_enforceable`.
    """
    need = route.ask_version or VERSION_MIN
    if version is None and route.ask_version is None:
        return
    if version is None or version < need:
        raise Refusal(
            Code.NOT_ENFORCEABLE,
            f"this route needs vLLM {need[0]}.{need[1]} or later behind it: others are not known to keep callers apart here",
        )
