"""Who sent a request: API keys of a file, a hook of an existing system, or a header from a named peer. Never a default."""

from __future__ import annotations

import asyncio
import hmac
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from xkv_frontend.core.heads import bearer, single
from xkv_frontend.core.keys import FILE_BYTES_MAX, KEYS_MAX, Keys, KeysFileError, parse_keys
from xkv_frontend.core.names import NameRefusedError, TenantName, tenant_name, user_name
from xkv_frontend.core.policy import Identity
from xkv_frontend.core.refusal import Code, Refusal, unauthorized
from xkv_frontend.errors import ConfigError
from xkv_frontend.files import read_keys_text

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_frontend.clock import Clock

log = logging.getLogger(__name__)

HOOK_TIMEOUT_S: Final = 5.0
GONE_MAX: Final = 2 * KEYS_MAX
RELOAD_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Caller:
    """What authentication may look at."""

    headers: Sequence[tuple[bytes, bytes]]
    """Names in lower case."""
    peer: str | None
    """Address of the other end of the connection."""
    method: str
    path: str


class Authenticator(Protocol):
    """Says who a caller is."""

    async def identify(self, caller: Caller) -> Identity:
        """Return the identity.

        Raises:
            Refusal: `unauthorized`, always with the same text; or `auth_unavailable`.
        """
        ...

    def refresh(self) -> frozenset[str]:
        """Look for news of the outside; return the ids of credentials that are not valid any more."""
        ...

    def tenants(self) -> frozenset[TenantName]:
        """Return the tenants that are known beforehand."""
        ...


class KeysFileAuthenticator:
    """API keys of a file, which is read again when it changes. A file that cannot be read changes nothing, and is logged."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Read the file.

        Raises:
            ConfigError: It cannot be used.
        """
        self._path = path
        self._clock = clock
        self._gone: frozenset[str] = frozenset()
        self._stamp = self._stat()
        self._take(self._read())
        self._looked_ns = clock()

    async def identify(self, caller: Caller) -> Identity:
        """Return the identity of the one key in the headers."""
        if self._clock() - self._looked_ns >= RELOAD_NS:
            self.refresh()
        presented = bearer(caller.headers)
        digest = self._keys.digest(presented or b"")
        record = self._table.get(digest)
        if presented is None or record is None or not hmac.compare_digest(record.digest, digest):
            raise unauthorized()
        return Identity(record.tenant, record.user, record.id)

    def refresh(self) -> frozenset[str]:
        """Read the file again if it has changed; return the ids of keys that are not active any more."""
        self._looked_ns = self._clock()
        stamp = self._stat()
        if stamp == self._stamp:
            return self._gone
        try:
            keys = self._read()
        except ConfigError as error:
            log.error("%s; the keys known so far stay in force", error)  # noqa: TRY400 - no trace: an operator's error
            self._stamp = stamp
            return self._gone
        self._stamp = stamp
        self._take(keys)
        log.info("the keys file was read again: %d active keys", len(self._table))
        return self._gone

    def tenants(self) -> frozenset[TenantName]:
        """Return the tenants of the file."""
        return self._tenants

    def _take(self, keys: Keys) -> None:
        before = getattr(self, "_keys", keys).records
        self._keys = keys
        self._table = keys.table()
        self._tenants = keys.tenants()
        revoked = {record.id for record in keys.records.values() if not record.active}
        active = {record.id for record in self._table.values()}
        # Kept until they are seen again: a removal must not be forgotten because another change follows at once.
        gone = (self._gone - active) | revoked | (before.keys() - keys.records.keys())
        self._gone = frozenset(list(gone)[:GONE_MAX])

    def _read(self) -> Keys:
        try:
            return parse_keys(read_keys_text(self._path, FILE_BYTES_MAX))
        except KeysFileError as error:
            raise ConfigError(f"the keys file {self._path}: {error}") from None

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)


HookResult = Identity | None
Hook = Callable[[Caller], HookResult | Awaitable[HookResult]]


class HookAuthenticator:
    """A function of the operator's own: `Caller -> Identity | None`, plain or async; a plain one runs in a thread."""

    def __init__(self, hook: Hook, timeout_s: float = HOOK_TIMEOUT_S) -> None:
        self._hook = hook
        self._timeout_s = timeout_s

    async def identify(self, caller: Caller) -> Identity:
        """Return what the hook says; None is `unauthorized`, an exception or too long a time `auth_unavailable`."""
        task = asyncio.ensure_future(self._call(caller))
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            finished = task.done()
            task.cancel()
        if not finished or task.cancelled() or task.exception() is not None:
            reason = (
                type(task.exception()).__name__ if finished and not task.cancelled() else "no answer in time"
            )
            log.error("the authentication hook failed: %s", reason)
            raise Refusal(Code.AUTH_UNAVAILABLE, "callers cannot be authenticated at the moment")
        identity = task.result()
        if identity is None:
            raise unauthorized()
        return _checked(identity)

    async def _call(self, caller: Caller) -> Any:
        if inspect.iscoroutinefunction(self._hook):
            return await self._hook(caller)
        result = await asyncio.to_thread(self._hook, caller)
        return await result if inspect.isawaitable(result) else result

    def refresh(self) -> frozenset[str]:
        """Nothing is kept."""
        return frozenset()

    def tenants(self) -> frozenset[TenantName]:
        """Nobody is known beforehand."""
        return frozenset()


def _checked(identity: Any) -> Identity:
    """Hold what a hook returned to the same rules as everything else."""
    try:
        assert isinstance(identity, Identity)
        tenant_name(identity.tenant)
        if identity.user is not None:
            user_name(identity.user)
    except (AssertionError, NameRefusedError, TypeError):
        log.error("the authentication hook returned no usable identity")  # noqa: TRY400 - the text may hold a name
        raise Refusal(Code.AUTH_UNAVAILABLE, "callers cannot be authenticated at the moment") from None
    return identity


def load_hook(reference: str) -> Hook:
    """Return the function that `MODULE:FUNCTION` names.

    Raises:
        ConfigError: There is none.
    """
    module, _, name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the authentication hook {reference}: {error}") from None
    if not callable(found):
        raise ConfigError(f"the authentication hook {reference} cannot be called")
    hook: Hook = found
    return hook


class TrustedHeaderAuthenticator:
    """A header that somebody in front of us sets, believed only when the connection comes from a named address."""

    def __init__(self, header: str, peers: frozenset[str], user_header: str | None = None) -> None:
        self._header = header.lower().encode("latin-1")
        self._user_header = user_header.lower().encode("latin-1") if user_header else None
        self._peers = peers

    async def identify(self, caller: Caller) -> Identity:
        """Return the identity that the header names."""
        if caller.peer is None or caller.peer not in self._peers:
            raise unauthorized()
        name = single(caller.headers, self._header)
        if name is None:
            raise unauthorized()
        try:
            return Identity(tenant_name(name), self._user(caller), "header")
        except NameRefusedError:
            raise unauthorized() from None

    def _user(self, caller: Caller) -> Any:
        if self._user_header is None or not any(name == self._user_header for name, _ in caller.headers):
            return None
        user = single(caller.headers, self._user_header)
        if user is None:
            raise unauthorized()
        return user_name(user)

    def refresh(self) -> frozenset[str]:
        """Nothing is kept."""
        return frozenset()

    def tenants(self) -> frozenset[TenantName]:
        """Nobody is known beforehand."""
        return frozenset()
