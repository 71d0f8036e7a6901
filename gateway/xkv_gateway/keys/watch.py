"""Keeps the doorkeeper's knowledge the same as the directory of keys."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from xkv_gateway.errors import ConfigError
from xkv_gateway.keys.directory import spelled_namespaces
from xkv_gateway.logs import AUDIT

if TYPE_CHECKING:
    from xkv_gateway.keys.directory import KeyDirectory
    from xkv_rpc.doors import Doorkeeper, Grant, KeyPair

log = logging.getLogger(__name__)

PERIOD_S: Final = 0.4
"""A revoked key is out after this and the time of one look, together well below a second."""
FAULTS_LOGGED_MAX: Final = 20


class KeyWatch:
    """Looks at the directory again and again, and at once when told to."""

    def __init__(self, directory: KeyDirectory, doorkeeper: Doorkeeper) -> None:
        self._directory = directory
        self._doorkeeper = doorkeeper
        self._grants: dict[str, Grant] = {}
        self._seen: object = None
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # A thread of its own: nothing else can keep a revoked key waiting.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keys")

    def begin(self) -> KeyPair:
        """Read the directory for the first time; returns the gateway's own pair.

        Raises:
            ConfigError: anything about it is wrong; nobody is let in by half a set of keys.
        """
        try:
            self._seen = self._directory.fingerprint()
            keys = self._directory.read()
        except OSError as error:
            raise ConfigError(
                f"the key directory {self._directory.path} cannot be read: {error.strerror}",
                advice="Make it with `xkv-gateway keys init`, and let nobody but its owner write to it.",
            ) from None
        if keys.faults:
            raise ConfigError(
                f"a key cannot be used: {keys.faults[0]}",
                advice="Put that right, or move the file out of the directory of keys.",
            )
        self._grants = keys.grants
        self._doorkeeper.replace(keys.grants)
        log.info("known keys: %d", len(keys.grants))
        return keys.server

    def start(self) -> None:
        """Watch from now on."""
        self._task = asyncio.create_task(self._run(), name="keys")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Let nobody in by keys that nobody watches any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the keys are not watched any more, so nobody is let in by key", exc_info=error)
            self._apply({})

    async def aclose(self) -> None:
        """Watch no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def look(self) -> None:
        """Look now."""
        self._now.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._now.wait()
                self._now.clear()
                self._seen = None
            except TimeoutError:
                pass
            await self._look()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            seen = await loop.run_in_executor(self._thread, self._directory.fingerprint)
            if seen == self._seen:
                return
            grants, faults = await loop.run_in_executor(self._thread, self._directory.clients)
        except OSError as error:
            # Who is known is unknown now: nobody, until the directory can be read again.
            if self._seen != error.errno:
                log.error("the keys cannot be read, so nobody is let in by key: %s", error.strerror)  # noqa: TRY400 - expected
            self._seen = error.errno
            self._apply({})
            return
        self._seen = seen
        for fault in faults[:FAULTS_LOGGED_MAX]:
            log.error("a key does not count: %s", fault)
        self._apply(grants)

    def _apply(self, grants: dict[str, Grant]) -> None:
        before, self._grants = self._grants, grants
        self._doorkeeper.replace(grants)
        for public in before.keys() | grants.keys():
            old, new = before.get(public), grants.get(public)
            if old == new:
                continue
            if new is None:
                assert old is not None
                AUDIT.info("key %s is out", old.name, extra={"event": "key_out", "key": old.name})
            else:
                spelled = spelled_namespaces(new)
                fields = {"event": "key_in", "key": new.name, "namespaces": spelled}
                AUDIT.info("key %s is in, for namespaces %s", new.name, ", ".join(spelled), extra=fields)
