"""One association: an admin queue pair, the I/O queue pairs, keep-alive, deadlines and events.

`open_association` builds it from nothing; from the first failure of any part it is over, and never revived.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import CommandFailed, DeviceError
from xkv_nvmeof.host_command import NO_DEADLINE, Exchange, Outcome
from xkv_nvmeof.host_settings import (
    ConnectionLost,
    DeadlinePassed,
    PeerTerminated,
    QueueFailure,
    QueueSettings,
)
from xkv_nvmeof.identify import IdentifyController, IdentifyFormatError
from xkv_nvmeof.initiator_admin import (
    AdminChannel,
    NamespaceView,
    look_at_namespace,
)
from xkv_nvmeof.initiator_connect import fabrics_connect
from xkv_nvmeof.initiator_errors import ConnectFailed, link_failed
from xkv_nvmeof.initiator_link import QueueLink
from xkv_nvmeof.initiator_socket import connect_socket
from xkv_nvmeof.logpages import (
    ACCESS_GROUP_BYTES,
    ACCESS_GROUPS_ONLY,
    ACCESS_HEADER_BYTES,
    LogFormatError,
    decode_access_log,
)
from xkv_nvmeof.multipath import Access
from xkv_nvmeof.pdu import DIGEST_FIELD, FatalStatus, PeerViolation
from xkv_nvmeof.spec import (
    MULTIPATH_ACCESS_REPORTING,
    AsyncEventType,
    Cns,
    ControllerConfiguration,
    LogPageId,
    NoticeInfo,
    Register,
    ShutdownNotification,
    ShutdownStatus,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.initiator_options import InitiatorOptions, Negotiated, TargetAddress

NS_PER_MS: Final = 1_000_000
_CHANGED_NAMESPACES_BYTES: Final = 4096
_ACCESS_GROUPS_MAX: Final = 2047
_LONGEST_TICK_S: Final = 1.0
_KEEP_ALIVES_PER_TIMEOUT: Final = 3
_EVENT_PAUSE_S: Final = 0.05
_EVENT_REFUSED_PAUSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Host:
    """What every association of a device shares."""

    options: InitiatorOptions
    clock: Callable[[], int]
    entropy: Callable[[int], bytes]


class Association:
    """A live association.

    `on_end(reason)` is called once; `on_namespace()` when the namespace may have changed, `on_access()` when the access to it may.
    """

    def __init__(self, host: Host, address: TargetAddress) -> None:
        self.address = address
        self.host = host
        self.links: list[QueueLink] = []
        """The I/O queue pairs."""
        self.admin: AdminChannel | None = None
        self.controller: IdentifyController | None = None
        self.negotiated: Negotiated | None = None
        self.namespace: NamespaceView | None = None
        self.access = Access.OPTIMIZED
        """As last read."""
        self.page_bytes = 4096
        self.keep_alive_ms = host.options.keep_alive_ms
        self.over = False
        self.reason = ""
        self.on_end: Callable[[str], None] | None = None
        self.on_namespace: Callable[[], None] | None = None
        self.on_access: Callable[[], None] | None = None
        self.expire_waiting: Callable[[int], int] | None = None
        """Lets the owner of calls that wait expire them; returns their next deadline."""
        self._all_links: list[QueueLink] = []
        self._joined: set[QueueLink] = set()
        """Links whose end is the end of the association: those that completed Connect."""
        self.loop = asyncio.get_running_loop()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._keep_alive_handle: asyncio.TimerHandle | None = None
        self._arm_handle: asyncio.TimerHandle | None = None
        self._keep_alive_sent_ns = host.clock()
        self._tick()

    # -- links -----------------------------------------------------------------------------------------------

    async def connect_link(
        self, qid: int, entries: int, in_capsule_bytes: int, *, nqn: str, cntlid: int, keep_alive_ms: int
    ) -> tuple[QueueLink, int]:
        """Make one queue pair: TCP, ICReq, Connect. Return it with the controller id.

        Raises:
            ConnectFailed: with the step and the reason.
        """
        options, clock = self.host.options, self.host.clock
        deadline_ns = clock() + options.connect_timeout_ms * NS_PER_MS
        address = self.address
        timeout_s = options.connect_timeout_ms / 1000
        sock = await connect_socket(address.host, address.port, options.admits, timeout_s)
        settings = QueueSettings(
            entries,
            in_capsule_bytes,
            max_receive_bytes=max(options.max_transfer_bytes, 1 << 20),
            header_digest=options.header_policy,
            data_digest=options.data_policy,
            flow_control=options.sq_flow_control,
        )
        link = QueueLink(sock, settings, clock, self._link_down)
        self._all_links.append(link)
        try:
            await link.setup(deadline_ns)
            found = await fabrics_connect(
                link,
                options,
                deadline_ns,
                nqn=nqn,
                qid=qid,
                cntlid=cntlid,
                entries=entries,
                keep_alive_ms=keep_alive_ms,
                entropy=self.host.entropy,
            )
        except (PeerViolation, QueueFailure) as error:
            raise link_failed(f"initialising queue {qid}", error, _hint(error)) from error
        except ConnectFailed:
            link.close()
            raise
        self._joined.add(link)
        return link, found

    # -- the end -----------------------------------------------------------------------------------------------

    @property
    def settles_at_ns(self) -> int:
        """From this moment the controller has certainly given up what this association sent."""
        options = self.host.options
        last = max((link.last_sent_ns for link in self._all_links), default=self.host.clock())
        return last + (self.keep_alive_ms + options.settle_margin_ms) * NS_PER_MS

    def end(self, failure: Exception) -> None:
        """End everything; all that is in flight finishes before this returns."""
        if self.over:
            return
        self.over = True
        self.reason = str(failure)
        for handle in (self._tick_handle, self._keep_alive_handle, self._arm_handle):
            if handle is not None:
                handle.cancel()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self.reason)
        for link in list(self._all_links):
            link.fail(failure)

    def _link_down(self, link: QueueLink) -> None:
        if link in self._joined:
            self.end(link.core.failure or ConnectionLost("connection lost"))
        else:
            self._all_links.remove(link)

    async def shut_down(self) -> None:
        """Tell the controller that this host leaves (CC.SHN, Base 3.6.1); bounded by `close_timeout_ms`."""
        if self.over or self.admin is None:
            return
        try:
            async with asyncio.timeout(self.host.options.close_timeout_ms / 1000):
                value = configuration(self.page_bytes, ShutdownNotification.NORMAL)
                await self.admin.property_set(Register.CC, value)
                # Over Fabrics a property can only be polled.
                while (await self.admin.property_get(Register.CSTS) >> 2) & 3 == ShutdownStatus.OCCURRING:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except (DeviceError, TimeoutError):
            return  # The end of the connection tells the controller the same.

    # -- time --------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Expire what is due and come back in time for the next deadline.

        Every deadline lies at least one whole timeout after the call that set it, and a tick comes at least twice in
        that time, so none is missed although no timer is set for any single command.
        """
        if self.over:
            return
        options = self.host.options
        now_ns = self.host.clock()
        next_ns = NO_DEADLINE if self.expire_waiting is None else self.expire_waiting(now_ns)
        for link in list(self._all_links):
            link.expire(now_ns)
            next_ns = min(next_ns, link.core.next_deadline_ns())
        shortest_ms = min(options.command_timeout_ms, options.connect_timeout_ms, options.keep_alive_ms)
        wait_s = min((next_ns - now_ns) / 1e9 + 0.001, shortest_ms / 2000, _LONGEST_TICK_S)
        self._tick_handle = self.loop.call_later(max(wait_s, 0.001), self._tick)

    def start_keep_alive(self) -> None:
        """Send Keep Alive from now on, on the admin queue's own connection and timer (Base 3.9)."""
        self._keep_alive_sent_ns = self.host.clock()
        self._plan_keep_alive()

    def _plan_keep_alive(self) -> None:
        delay_s = self.host.options.keep_alive_ms / 1000 / _KEEP_ALIVES_PER_TIMEOUT
        self._keep_alive_handle = self.loop.call_later(delay_s, self._keep_alive)

    def _keep_alive(self) -> None:
        assert self.admin is not None
        if self.over:
            return
        now_ns = self.host.clock()
        if now_ns - self._keep_alive_sent_ns > self.keep_alive_ms * NS_PER_MS:
            # This process was stopped or starved: the controller has given the association up, or is about to.
            self.end(DeadlinePassed("the keep-alive time passed without this host being able to send"))
            return
        self._keep_alive_sent_ns = now_ns
        patience_ms = min(self.host.options.command_timeout_ms, self.keep_alive_ms)
        entry = bytearray(builders.keep_alive(0).to_bytes())
        exchange = Exchange(entry, now_ns + patience_ms * NS_PER_MS, on_finish=self._keep_alive_done)
        if not self.admin.link.core.room:
            self.end(DeadlinePassed("the admin queue is stuck"))
            return
        self.admin.link.submit(exchange)
        self._plan_keep_alive()

    def _keep_alive_done(self, exchange: Exchange) -> None:
        if exchange.outcome is Outcome.COMPLETED and exchange.status:
            self.end(ConnectionLost(f"Keep Alive failed with status {exchange.status:#05x}"))

    # -- events --------------------------------------------------------------------------------------------------

    def arm_events(self) -> None:
        """Keep one Asynchronous Event Request outstanding (AERL allows at least one; Base 5.2)."""
        assert self.admin is not None
        if self.over:
            return
        if not self.admin.link.core.room:
            self._plan_arming()
            return
        entry = bytearray(builders.async_event_request(0).to_bytes())
        self.admin.link.submit(Exchange(entry, on_finish=self._event))

    def _plan_arming(self, pause_s: float = _EVENT_PAUSE_S) -> None:
        """Ask again after a moment, so that a controller that has events without end does not keep this host busy."""
        self._arm_handle = self.loop.call_later(pause_s, self.arm_events)

    def _event(self, exchange: Exchange) -> None:
        if exchange.outcome is not Outcome.COMPLETED or self.over:
            return
        if exchange.status:
            # Without a request nothing would be heard of the namespace any more.
            self._plan_arming(_EVENT_REFUSED_PAUSE_S)
            return
        kind, info = exchange.result & 7, exchange.result >> 8 & 0xFF
        self._plan_arming()
        if kind != AsyncEventType.NOTICE:
            return
        if info == NoticeInfo.NAMESPACE_CHANGED and self.on_namespace is not None:
            self.on_namespace()
        elif info == NoticeInfo.ANA_CHANGE and self.on_access is not None:
            self.on_access()

    async def reread_namespace(self) -> NamespaceView:
        """Read the changed-namespace log, which re-arms the event, and look at the namespace again.

        Raises:
            NamespaceUnusable: it is gone.
            CommandFailed: the controller does not answer that now: nothing is known.
            DeviceError: the association failed meanwhile.
        """
        assert self.admin is not None
        try:
            await self.admin.log_page(LogPageId.CHANGED_NAMESPACES, _CHANGED_NAMESPACES_BYTES)
        except CommandFailed as failed:
            if not failed.do_not_retry:
                raise
            # It has no such log, and what it would say is looked at in any case.
        await self.identify_controller()
        return await self.look()

    @property
    def reports_access(self) -> bool:
        """Whether the controller reports asymmetric namespace access."""
        return self.controller is not None and bool(self.controller.multipath & MULTIPATH_ACCESS_REPORTING)

    async def read_access(self) -> Access:
        """Read what access this controller gives to the namespace, which re-arms the event of its change (Base 8.1).

        Raises:
            ConnectFailed: the log is malformed, does not name the namespace's group, or the connection ended.
            DeviceError: as `execute`.
        """
        if not self.reports_access or self.namespace is None or not self.namespace.access_group:
            return Access.OPTIMIZED
        assert self.admin is not None
        assert self.controller is not None
        count = min(max(self.controller.access_group_count, 1), _ACCESS_GROUPS_MAX)
        size = ACCESS_HEADER_BYTES + count * ACCESS_GROUP_BYTES
        try:
            data = await self.admin.log_page(LogPageId.ASYMMETRIC_ACCESS, size, specific=ACCESS_GROUPS_ONLY)
            states = {one.group: one.state for one in decode_access_log(data)}
            return Access(states[self.namespace.access_group])
        except (LogFormatError, KeyError, ValueError) as error:
            raise ConnectFailed(f"the log of asymmetric namespace access: {error}") from error

    async def identify_controller(self) -> IdentifyController:
        """Read Identify Controller.

        Raises:
            ConnectFailed: it is malformed.
        """
        assert self.admin is not None
        try:
            self.controller = IdentifyController.from_bytes(await self.admin.identify(Cns.CONTROLLER))
        except IdentifyFormatError as error:
            raise ConnectFailed(f"Identify Controller: {error}") from error
        return self.controller

    async def look(self) -> NamespaceView:
        """Identify the namespace; raises as `look_at_namespace`."""
        assert self.admin is not None
        assert self.controller is not None
        limit = self.controller.max_transfer_bytes(self.page_bytes)
        wanted = self.host.options.max_transfer_bytes
        self.namespace = await look_at_namespace(
            self.admin,
            self.controller,
            self.address.nqn,
            self.address.nsid,
            page_bytes=self.page_bytes,
            transfer_bytes=wanted if limit is None else min(limit, wanted),
        )
        return self.namespace


def _hint(error: Exception) -> str:
    if (
        isinstance(error, PeerTerminated)
        and error.fatal_status == FatalStatus.UNSUPPORTED_PARAMETER
        and error.field_offset_bytes == DIGEST_FIELD
    ):
        return ": it requires a digest that this host does not ask for"
    return ""


def configuration(page_bytes: int, shutdown: ShutdownNotification = ShutdownNotification.NONE) -> int:
    """Return CC: enabled, NVM command set, entries of 64 and 16 bytes (Base 3.1.3.5)."""
    return ControllerConfiguration(
        enable=True, page_bytes=page_bytes, shutdown=shutdown, sq_entry_log2=6, cq_entry_log2=4
    ).to_int()
