"""The salt: a keyed hash of who shares a cache. Nobody without the secret can guess it, and it never changes by itself."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import Final, assert_never

from xkv_frontend.core.names import Scope, ScopeIds, deployment_name
from xkv_rpc import scope_of

SECRET_BYTES_MIN: Final = 32
DISTINCT_BYTES_MIN: Final = 8
"""Fewer different bytes than this in a secret are a placeholder (zeros, a word repeated), not 32 random bytes."""
REQUEST_ENTROPY_BYTES: Final = 16
PUBLISHED_SECRET: Final = bytes(range(32))
"""The secret of the documented test vector: everybody knows it."""
_HEX: Final = re.compile(rb"(?:[0-9a-fA-F]{2})+")


class SecretRefusedError(ValueError):
    """The secret cannot protect anything. The text says why, without the secret."""


class Secret:
    """The key of all salts. It is in no text form of this object."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Take `key` as it is.

        Raises:
            SecretRefusedError: Shorter than 32 bytes, or a placeholder.
        """
        if len(key) < SECRET_BYTES_MIN:
            raise SecretRefusedError(f"the secret has {len(key)} bytes; it needs at least {SECRET_BYTES_MIN}")
        if len(set(key)) < DISTINCT_BYTES_MIN:
            raise SecretRefusedError("the secret is a placeholder: nearly all of its bytes are the same")
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")

    @property
    def published(self) -> bool:
        """Whether this is the secret of the documented test vector."""
        return hmac.compare_digest(self._key, PUBLISHED_SECRET)

    def digest(self, message: bytes) -> bytes:
        """Return HMAC-SHA256 of `message`: 32 bytes."""
        return hmac.digest(self._key, message, hashlib.sha256)

    @classmethod
    def from_hex(cls, text: bytes) -> Secret:
        """Return the secret that `text` spells in hexadecimal.

        Raises:
            SecretRefusedError: Not hexadecimal, or refused as above.
        """
        stripped = text.strip()
        if not _HEX.fullmatch(stripped):
            raise SecretRefusedError("the secret is not hexadecimal")
        return cls(bytes.fromhex(stripped.decode("ascii")))

    @classmethod
    def from_file_content(cls, content: bytes) -> Secret:
        """Return the secret in a file: hexadecimal text, else the bytes themselves.

        The line end that an editor leaves behind a text is not part of it; of binary content every byte counts.

        Raises:
            SecretRefusedError: Refused as above.
        """
        stripped = content.strip()
        if _HEX.fullmatch(stripped):
            return cls.from_hex(stripped)
        return cls(
            content.rstrip(b"\r\n")
            if stripped.isascii() and stripped.decode("ascii").isprintable()
            else content
        )


class Salter:
    """Derives salts, and the names under which a tenant's media are cached, for one deployment."""

    def __init__(self, secret: Secret, deployment: str) -> None:
        """Bind a secret to a deployment.

        Raises:
            NameRefusedError: The deployment's name is not allowed.
        """
        self._secret = secret
        self._deployment = deployment_name(deployment)

    def salt(self, scope: Scope, ids: ScopeIds, request_id: bytes = b"") -> str | None:
        """Return the `cache_salt` of a scope: 43 characters of base64url, or None for `none`.

        `request_id` are 16 random bytes, for scope `request` only.
        """
        parts = _parts(scope, ids, request_id)
        if parts is None:
            return None
        return _text(self._secret.digest("|".join(("v1", self._deployment, *parts)).encode()))

    def media_uuid(self, scope: Scope, ids: ScopeIds, request_id: bytes, uuid: str) -> str:
        """Return what stands for a client's `uuid` of media: the same inside one scope, unrelated in any other.

        With scope `none` it is the tenant's: who names media can also name them wrongly.
        """
        parts = _parts(narrow_to_tenant(scope), ids, request_id)
        assert parts is not None
        context = "|".join(("v1-uuid", self._deployment, *parts))
        return _text(self._secret.digest(context.encode() + b"\0" + uuid.encode("utf-8", "surrogatepass")))


def narrow_to_tenant(scope: Scope) -> Scope:
    """Return `scope`, or `tenant` instead of `none`."""
    return Scope.TENANT if scope is Scope.NONE else scope


def scope_tag(salt: str) -> str:
    """Return the one-way tag of a salt in hexadecimal: the scope by which the gateway knows it. Safe to show."""
    return scope_of(salt).hex()


def _parts(scope: Scope, ids: ScopeIds, request_id: bytes) -> tuple[str, ...] | None:
    match scope:
        case Scope.NONE:
            return None
        case Scope.TENANT:
            return (scope.value, ids.tenant)
        case Scope.USER:
            assert ids.user is not None
            return (scope.value, ids.tenant, ids.user)
        case Scope.SESSION:
            assert ids.session is not None
            return (scope.value, ids.tenant, ids.user or "", ids.session)
        case Scope.REQUEST:
            assert len(request_id) == REQUEST_ENTROPY_BYTES
            return (scope.value, ids.tenant, request_id.hex())
        case _:
            assert_never(scope)


def _text(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")
