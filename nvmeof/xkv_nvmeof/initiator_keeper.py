"""Keeps a device connected: state, reconnection with growing delays, identity, events of the namespace."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from xkv_nvmeof.blockdev import DeviceError, DeviceState
from xkv_nvmeof.host_settings import ClosedByHost
from xkv_nvmeof.initiator_errors import AuthenticationRefused, ConnectFailed, NamespaceUnusable
from xkv_nvmeof.initiator_open import check_namespace, open_association
from xkv_nvmeof.initiator_retry import Backoff, ReconnectLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.blockdev import DeviceCounters, Geometry
    from xkv_nvmeof.initiator_admin import NamespaceView
    from xkv_nvmeof.initiator_association import Association, Host
    from xkv_nvmeof.initiator_dispatch import Dispatcher
    from xkv_nvmeof.initiator_options import TargetAddress

_logger = logging.getLogger(__name__)


class Keeper:
    """Owns the association of one device; `dispatcher` gets it while it is up and the namespace is there."""

    def __init__(
        self,
        host: Host,
        address: TargetAddress,
        dispatcher: Dispatcher,
        counters: DeviceCounters,
        entropy: Callable[[int], bytes],
    ) -> None:
        self.address = address
        self.state = DeviceState.OFFLINE
        self.reason = "not connected yet"
        self.association: Association | None = None
        self.view: NamespaceView | None = None
        self._opened: NamespaceView | None = None
        self.settles_at_ns = 0
        self.state_listeners: list[Callable[[DeviceState, str], None]] = []
        self.geometry_listeners: list[Callable[[Geometry, Geometry], None]] = []
        self._host = host
        self._dispatcher = dispatcher
        self.counters = counters
        self._backoff = Backoff(
            host.options.reconnect_delay_min_ms, host.options.reconnect_delay_max_ms, entropy
        )
        self._log = ReconnectLog(_logger, host.clock)
        self._wake = asyncio.Event()
        self._look_again = False
        self._hurry = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def seen(self) -> NamespaceView:
        """The namespace as last looked at; there is one from the first connection on."""
        assert self.view is not None
        return self.view

    async def start(self) -> None:
        """Connect for the first time, and keep connected from then on.

        Raises:
            ConnectFailed: or a subclass.
        """
        self._adopt(await open_association(self._host, self.address, None))
        self._task = asyncio.create_task(self._run(), name="nvme-tcp-keeper")
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
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        association = self.association
        if association is not None:
            await association.shut_down()
            association.end(ClosedByHost("closed by this host"))

    # -- state -------------------------------------------------------------------------------------------------

    def _set_state(self, state: DeviceState, reason: str) -> None:
        changed = state is not self.state
        self.state, self.reason = state, reason
        if changed:
            for listener in list(self.state_listeners):
                listener(state, reason)

    def _adopt(self, association: Association) -> None:
        assert association.namespace is not None
        if association.over:
            return
        self.association = association
        association.on_end = self._ended
        association.on_namespace = self._namespace_event
        self._see(association.namespace)
        self._dispatcher.attach(association)
        self._backoff.reset()
        self._log.success()
        self._set_state(DeviceState.ONLINE, "connected")

    def _see(self, view: NamespaceView) -> None:
        before, self.view = self.view, view
        if self._opened is None:
            self._opened = view
        if before is not None and before.geometry != view.geometry:
            _logger.info(
                "namespace %d: %d bytes now, %d before",
                view.identity.nsid,
                view.geometry.size_bytes,
                before.geometry.size_bytes,
            )
            for listener in list(self.geometry_listeners):
                listener(before.geometry, view.geometry)

    def _ended(self, reason: str) -> None:
        association, self.association = self.association, None
        assert association is not None
        self.settles_at_ns = max(self.settles_at_ns, association.settles_at_ns)
        self._dispatcher.detach(reason)
        self._log.lost(reason, closing=self._closing)
        self._set_state(DeviceState.OFFLINE, reason)
        self._wake.set()

    def _namespace_event(self) -> None:
        self._look_again = True
        self._wake.set()

    # -- the task ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.association is None:
                await self._reconnect()
            elif self._look_again:
                self._look_again = False
                await self._look(self.association)

    async def _reconnect(self) -> None:
        while self.association is None:
            delay_s = 0.0 if self._hurry else self._backoff.next_s()
            self._hurry = False
            try:
                async with asyncio.timeout(delay_s):
                    while not self._hurry:
                        await self._wake.wait()
                        self._wake.clear()
            except TimeoutError:
                self._hurry = False
            try:
                association = await open_association(self._host, self.address, self._opened)
            except ConnectFailed as error:
                self.reason = str(error)
                self._dispatcher.detach(self.reason)
                self._log.failure(self.reason)
                if isinstance(error, AuthenticationRefused):
                    self._backoff.give_time()
                continue
            self.counters.reconnects += 1
            self._look_again = False
            self._adopt(association)

    async def _look(self, association: Association) -> None:
        """After a namespace event: grown, shrunk, gone, or back again."""
        try:
            view = await association.reread_namespace()
            assert self._opened is not None
            check_namespace(self._opened, view)
        except (NamespaceUnusable, ConnectFailed) as error:
            if self.association is association:
                # The association stays: it will tell when the namespace is there again.
                self._dispatcher.detach(str(error))
                self._set_state(DeviceState.OFFLINE, str(error))
            return
        except DeviceError as error:
            association.end(error)
            return
        if self.association is association:
            self._see(view)
            self._dispatcher.attach(association)
            self._set_state(DeviceState.ONLINE, "connected")


def _report_death(task: asyncio.Task[None]) -> None:
    """The task ends only when cancelled; anything else is a mistake of ours that must not pass in silence."""
    if not task.cancelled() and task.exception() is not None:
        _logger.critical("the card is not reconnected any more", exc_info=task.exception())
