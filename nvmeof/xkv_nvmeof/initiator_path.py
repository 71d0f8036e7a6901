"""Keeps one path to the namespace connected: one address, one association at a time, with growing delays between attempts."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from xkv_nvmeof.blockdev import CommandFailed, DeviceError
from xkv_nvmeof.host_settings import ClosedByHost
from xkv_nvmeof.initiator_errors import AuthenticationRefused, ConnectFailed, NamespaceUnusable
from xkv_nvmeof.initiator_open import open_association
from xkv_nvmeof.initiator_retry import Backoff, ReconnectLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.blockdev import DeviceCounters
    from xkv_nvmeof.initiator_admin import NamespaceView
    from xkv_nvmeof.initiator_association import Association, Host
    from xkv_nvmeof.initiator_options import TargetAddress

_logger = logging.getLogger(__name__)


class Owner(Protocol):
    """Whom a path tells what becomes of it."""

    @property
    def opened(self) -> NamespaceView | None:
        """The namespace as it was when the device was opened; None before."""
        ...

    def path_up(self, path: Path, association: Association, view: NamespaceView) -> None:
        """The path can be used, or its view or its access has changed. Raises ConnectFailed: it is not the right namespace."""
        ...

    def path_asked(self, association: Association) -> None:
        """The path is about to say what access it gives."""
        ...

    def path_down(self, association: Association | None, reason: str) -> None:
        """A path cannot be used, because of `reason`; `association` has ended, or has no namespace to offer."""
        ...


class Path:
    """One path. `connect` once, then `start`; `aclose` in the end."""

    def __init__(
        self,
        host: Host,
        address: TargetAddress,
        owner: Owner,
        counters: DeviceCounters,
        entropy: Callable[[int], bytes],
    ) -> None:
        self.address = address
        self.reason = "not connected yet"
        self.association: Association | None = None
        self.settles_at_ns = 0
        options = host.options
        self.backoff = Backoff(options.reconnect_delay_min_ms, options.reconnect_delay_max_ms, entropy)
        self._host = host
        self._owner = owner
        self._counters = counters
        self._connected_once = False
        self._log = ReconnectLog(_logger, host.clock)
        self._wake = asyncio.Event()
        self._look_again = False
        self._later: asyncio.TimerHandle | None = None
        """When it is looked at the namespace again, whatever is told of it."""
        self._access_again = False
        self._hurry = False
        self._closing = False
        self._first: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Make an association and offer it to the owner.

        Raises:
            ConnectFailed: or a subclass.
        """
        association = await open_association(self._host, self.address, self._owner.opened)
        assert association.namespace is not None
        try:
            if association.over:
                raise ConnectFailed(association.reason)  # noqa: TRY301 - the same end as for a namespace that is refused
            self._counters.reconnects += self._connected_once
            self._owner.path_up(self, association, association.namespace)
        except ConnectFailed as error:
            association.end(error)
            raise
        self._connected_once = True
        self.association = association
        association.on_end = self._ended
        association.on_namespace = self._namespace_event
        association.on_access = self._access_event
        self._look_again = self._access_again = False
        self.backoff.reset()
        self._log.success()
        self.reason = "connected"

    def start(self, first: asyncio.Task[None] | None = None) -> None:
        """Keep connected from now on; `first` is an attempt that is under way."""
        self._first = first
        self._task = asyncio.create_task(self._run(), name="nvme-tcp-path")
        self._task.add_done_callback(_report_death)

    def retarget(self, host: str, port: int) -> None:
        """Use another address from the next attempt on; while offline that is made at once."""
        self.address = replace(self.address, host=host, port=port)
        self._hurry = True
        self._wake.set()

    def hurry(self) -> None:
        """Try to connect at once, if there is no association."""
        if self.association is None:
            self._hurry = True
            self._wake.set()

    async def aclose(self) -> None:
        """Shut the controller down in order and end everything. Idempotent."""
        self._closing = True
        if self._later is not None:
            self._later.cancel()
        tasks = [task for task in (self._task, self._first) if task is not None]
        self._task = self._first = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        association = self.association
        if association is not None:
            await association.shut_down()
            association.end(ClosedByHost("closed by this host"))

    # -- what the association tells ------------------------------------------------------------------------------

    def _ended(self, reason: str) -> None:
        association, self.association = self.association, None
        assert association is not None
        self.settles_at_ns = max(self.settles_at_ns, association.settles_at_ns)
        self._log.lost(f"{self.address.host}:{self.address.port}: {reason}", closing=self._closing)
        self.reason = reason
        self._owner.path_down(association, reason)
        self._wake.set()

    def _namespace_event(self) -> None:
        self._look_again = True
        self._wake.set()

    def _access_event(self) -> None:
        self._access_again = True
        if self.association is not None:
            self._owner.path_asked(self.association)
        self._wake.set()

    # -- the task ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        if self._first is not None:
            try:
                await self._first
            except ConnectFailed as error:
                self._failed(error)
            self._first = None
        if self.association is None:
            self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            association = self.association
            if association is None:
                await self._reconnect()
            elif self._look_again:
                self._look_again = False
                await self._look(association)
            elif self._access_again:
                self._access_again = False
                await self._read_access(association)
            if self._look_again or self._access_again:
                self._wake.set()

    async def _reconnect(self) -> None:
        while self.association is None:
            delay_s = 0.0 if self._hurry else self.backoff.next_s()
            self._hurry = False
            try:
                async with asyncio.timeout(delay_s):
                    while not self._hurry:
                        await self._wake.wait()
                        self._wake.clear()
            except TimeoutError:
                self._hurry = False
            try:
                await self.connect()
            except ConnectFailed as error:
                self._failed(error)

    def _failed(self, error: ConnectFailed) -> None:
        self.reason = str(error)
        self._log.failure(self.reason)
        if isinstance(error, AuthenticationRefused):
            self.backoff.give_time()
        self._owner.path_down(None, self.reason)

    async def _look(self, association: Association) -> None:
        """After a namespace event: grown, shrunk, gone, or back again."""
        try:
            view = await association.reread_namespace()
            await self._offer(association, view)
            self.backoff.reset()
        except CommandFailed as error:
            # Not known is not gone.
            self._log.failure(f"looking at the namespace: {error}")
            self._look_later()
        except (NamespaceUnusable, ConnectFailed) as error:
            if self.association is association:
                self.reason = str(error)
                self._owner.path_down(association, self.reason)
                self._look_later()
        except DeviceError as error:
            association.end(error)

    def _look_later(self) -> None:
        """The controller should tell when there is news of the namespace, but nobody waits for that alone."""
        if self._later is not None:
            self._later.cancel()
        self._later = asyncio.get_running_loop().call_later(self.backoff.next_s(), self._namespace_event)

    async def _read_access(self, association: Association) -> None:
        """After an event, or a status that speaks of the path."""
        try:
            assert association.namespace is not None
            await self._offer(association, association.namespace)
        except DeviceError as error:
            association.end(error)

    async def _offer(self, association: Association, view: NamespaceView) -> None:
        reading = True
        while reading:  # what an event says during the reading may be missing in what was read
            self._access_again = False
            association.access = await association.read_access()
            reading = self._access_again
        if self.association is association:
            self._owner.path_up(self, association, view)
            self.reason = "connected"


def _report_death(task: asyncio.Task[None]) -> None:
    """The task ends only when cancelled; anything else is a mistake of ours that must not pass in silence."""
    if not task.cancelled() and task.exception() is not None:
        _logger.critical("the card is not reconnected any more", exc_info=task.exception())
