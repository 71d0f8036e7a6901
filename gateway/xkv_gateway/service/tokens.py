"""Bearer tokens of the admin port: who may read, who may change, and a line for each change.

With a token configured, every request needs one, but for `/healthz`; without, whoever reaches the port may do everything, and
the port is on loopback. The audit line names the route, not the path: a path may hold a salt.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import ConfigError
from xkv_gateway.logs import AUDIT
from xkv_process.files import regular_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

TOKEN_CHARACTERS_MIN: Final = 16
TOKEN_BYTES_MAX: Final = 4096
READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
ALWAYS_OPEN: Final = frozenset({"/healthz"})


@dataclass(frozen=True, slots=True)
class Tokens:
    """Digests of the tokens; what is compared has always the same length."""

    write: bytes | None = field(default=None, repr=False)
    read: bytes | None = field(default=None, repr=False)

    @property
    def asked_for(self) -> bool:
        """Whether requests need one."""
        return self.write is not None or self.read is not None

    def role(self, token: str) -> str | None:
        """Return `write` or `read`, or None for a token that is neither. In constant time."""
        digest = _digest(token)
        writes = hmac.compare_digest(digest, self.write or bytes(len(digest)))
        reads = hmac.compare_digest(digest, self.read or bytes(len(digest)))
        return "write" if writes and self.write else "read" if reads and self.read else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def read_tokens(write_file: str | None, read_file: str | None, credentials: Path | None) -> Tokens:
    """Return the tokens from their files, else from systemd's credentials.

    Raises:
        ConfigError: a file cannot be read, is open to others, or does not hold a token.
    """
    return Tokens(
        write=_read(write_file, "admin.token_file", credentials, "admin-token"),
        read=_read(read_file, "admin.read_token_file", credentials, "admin-read-token"),
    )


def _read(file: str | None, key: str, credentials: Path | None, credential: str) -> bytes | None:
    if file is not None:
        return _digest(read_token(Path(file), key, private=True))
    if credentials is not None and (credentials / credential).exists():
        return _digest(read_token(credentials / credential, credential, private=False))
    return None


def read_token(path: Path, key: str, *, private: bool) -> str:
    """Return the token that a file holds. Raises ConfigError, without the token."""
    try:
        with open(path, "rb", opener=regular_only) as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            raw = stream.read(TOKEN_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    if private and mode & 0o077:
        raise ConfigError(
            f"{key}: {path} holds a secret and is open to others (mode {mode:04o})",
            advice="chmod 600 it, and make a new token if anybody may have read it.",
        )
    token = raw.decode("ascii", errors="replace").strip()
    if not token.isascii() or not token.isprintable() or " " in token or len(raw) > TOKEN_BYTES_MAX:
        raise ConfigError(f"{key}: {path} must hold one line of printable ASCII without spaces")
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"{key}: the token in {path} is shorter than {TOKEN_CHARACTERS_MIN} characters",
            advice="`openssl rand -hex 32` makes a good one.",
        )
    return token


class TokenCheck:
    """Asks for the token, before anything else looks at the request.

    Args:
        app: what is behind.
        tokens: gives the tokens that count now.
        refusal: makes the answer to who is refused.
    """

    def __init__(
        self, app: ASGIApp, tokens: Callable[[], Tokens], refusal: Callable[[int, str], Response]
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        tokens = self._tokens()
        if scope["type"] != "http" or not tokens.asked_for or scope["path"] in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        role = tokens.role(_bearer(scope))
        if role == "write" or (role == "read" and scope["method"] in READING):
            scope["xkv_role"] = role
            await self._app(scope, receive, send)
            return
        log.warning(
            "an admin request from %s was refused: %s",
            peer_of(scope),
            "no token" if role is None else "reads only",
        )
        if role is None:
            response = self._refusal(HTTPStatus.UNAUTHORIZED, "a bearer token is needed")
            response.headers["WWW-Authenticate"] = "Bearer"
        else:
            response = self._refusal(HTTPStatus.FORBIDDEN, "this token may only read")
        await response(scope, receive, send)


class AuditTrail:
    """Writes one line about each request that may have changed something."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] in READING:
            await self._app(scope, receive, send)
            return
        status = 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            route = getattr(scope.get("route"), "path", "no route")
            # Below /v1 a path has names that operators gave; elsewhere it may have a salt.
            target = ascii(scope["path"]) if route.startswith("/v1/") else route
            who, peer = scope.get("xkv_role", "none"), peer_of(scope)
            fields = {"event": "admin", "method": scope["method"], "target": target, "status": status}
            AUDIT.info(
                "admin %s %s, token %s, from %s: %d",
                ascii(scope["method"]),
                target,
                who,
                peer,
                status,
                extra={**fields, "token": who, "peer": peer},
            )


def _bearer(scope: Scope) -> str:
    """Return the token of the one Authorization header; more than one is none."""
    found = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
    if len(found) != 1:
        return ""
    scheme, _, token = found[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def peer_of(scope: Scope) -> str:
    """Return the address of the peer, for people."""
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else "the Unix socket"
