"""A controller: properties, features, async events and keep-alive of one association (Base 3.5, 5, 6). Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from xkv_nvmeof import controller_admin
from xkv_nvmeof.controller_states import CONTROLLER_TABLE, ControllerEvent, ControllerPhase
from xkv_nvmeof.controller_types import (
    KEEP_ALIVE_STEP_NS,
    MAX_ASYNC_EVENTS,
    MIN_PAGE_BYTES,
    Reply,
    ShutdownCommand,
)
from xkv_nvmeof.spec import (
    ASYNC_ACCESS_CHANGE,
    ASYNC_NAMESPACE_ATTRIBUTE,
    PROPERTY_BYTES,
    AsyncEventType,
    Capabilities,
    ControllerConfiguration,
    ControllerStatus,
    FabricsType,
    FeatureId,
    LogPageId,
    NoticeInfo,
    Register,
    ShutdownNotification,
    ShutdownStatus,
    Status,
)

if TYPE_CHECKING:
    from xkv_nvmeof.command import ConnectData, SubmissionEntry
    from xkv_nvmeof.controller_card import Card
    from xkv_nvmeof.controller_connection import ControllerConnection
    from xkv_nvmeof.multipath import Access

_SHUTDOWN_STATUS: Final = {
    ControllerPhase.SHUTTING_DOWN: ShutdownStatus.OCCURRING,
    ControllerPhase.SHUT_DOWN: ShutdownStatus.COMPLETE,
}
MAX_CHANGED_NAMESPACES: Final = 1024
"""Entries of the Changed Namespace List log page (Base 5.16.1.5)."""


def round_keep_alive(kato_ms: int, minimum_ns: int) -> int:
    """Return the keep-alive timeout in force, in ns: rounded up to whole steps; 0 = off (Base 5.27.1.12)."""
    if kato_ms == 0:
        return 0
    return max(-(-kato_ms * 1_000_000 // KEEP_ALIVE_STEP_NS) * KEEP_ALIVE_STEP_NS, minimum_ns)


class Controller:
    """One association: an admin queue and its I/O queues. Ends when the admin connection or an I/O one is lost."""

    def __init__(
        self,
        card: Card,
        admin: ControllerConnection,
        cntlid: int,
        host: ConnectData,
        *,
        keep_alive_ns: int,
        now_ns: int,
        discovery: bool,
    ) -> None:
        self.card = card
        self.cntlid = cntlid
        self.host = host
        self.discovery = discovery
        self.phase = ControllerPhase.DISABLED
        self.queues: dict[int, ControllerConnection] = {0: admin}
        self.keep_alive_ns = keep_alive_ns
        self.last_alive_ns = now_ns
        self.granted_io_queues = 0 if discovery else card.config.max_io_queues
        self.features: dict[int, int] = controller_admin.default_features(self)
        self.changed_namespaces: list[int] = []
        self._configuration = ControllerConfiguration()
        self._event_cids: deque[int] = deque()
        self._events: dict[int, int] = {}
        self._masked: set[int] = set()

    @property
    def admin_connection(self) -> ControllerConnection:
        """The connection of the admin queue."""
        return self.queues[0]

    @property
    def ready(self) -> bool:
        """Whether commands other than Fabrics ones are processed (CSTS.RDY)."""
        return self.phase is ControllerPhase.READY

    @property
    def keep_alive_deadline_ns(self) -> int | None:
        """When the association ends without a Keep Alive; None: never."""
        return self.last_alive_ns + self.keep_alive_ns if self.keep_alive_ns else None

    def _step(self, event: ControllerEvent) -> None:
        self.phase = CONTROLLER_TABLE[self.phase, event]

    # ---- association -----------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """End the association: all its connections close. Idempotent."""
        if self.phase is ControllerPhase.GONE:
            return
        self._step(ControllerEvent.ASSOCIATION_END)
        for connection in list(self.queues.values()):
            connection.end(reason)
        self.card.forget(self)

    def disconnected(self, connection: ControllerConnection) -> None:
        """An I/O queue was deleted in order, by Disconnect (Base 6.4)."""
        self.queues.pop(connection.queue_id, None)

    # ---- properties ------------------------------------------------------------------------------------------

    def fabrics(self, entry: SubmissionEntry) -> Reply:
        """Answer a Fabrics command of the admin queue (Base 6.6, 6.7)."""
        offset_bytes = entry.cdw11
        if entry.fabrics_type not in (FabricsType.PROPERTY_GET, FabricsType.PROPERTY_SET):
            return Reply(Status.INVALID_OPCODE)
        try:
            register = Register(offset_bytes)
        except ValueError:
            return Reply(Status.INVALID_FIELD)
        size_bytes = {0: 4, 1: 8}.get(entry.cdw10 & 7)
        if size_bytes != PROPERTY_BYTES[register]:
            return Reply(Status.INVALID_FIELD)
        if entry.fabrics_type == FabricsType.PROPERTY_GET:
            return self._property_get(register)
        if register is not Register.CC:
            return Reply(Status.INVALID_FIELD)
        return self._configure(ControllerConfiguration.from_int(entry.cdw12))

    def _property_get(self, register: Register) -> Reply:
        config = self.card.config
        match register:
            case Register.CAP:
                value = Capabilities(config.max_queue_entries, config.ready_timeout_ns).to_int()
            case Register.VS:
                value = config.version
            case Register.CC:
                value = self._configuration.to_int()
            case Register.CSTS:
                value = ControllerStatus(
                    self.ready,
                    self.phase is ControllerPhase.FAILED,
                    _SHUTDOWN_STATUS.get(self.phase, ShutdownStatus.NORMAL_OPERATION),
                ).to_int()
            case Register.NSSR:
                return Reply(Status.INVALID_FIELD)
        return Reply(dw0=value & 0xFFFF_FFFF, dw1=value >> 32)

    def _configure(self, new: ControllerConfiguration) -> Reply:
        """Property Set of CC (Base 3.1.3.5, 3.5.3, 3.6)."""
        old, self._configuration = self._configuration, new
        if old.enable and not new.enable:
            self._reset()
        if new.shutdown is not ShutdownNotification.NONE and old.shutdown is ShutdownNotification.NONE:
            self._step(ControllerEvent.SHUTDOWN)
            self.admin_connection.hand_over(ShutdownCommand())
        elif new.enable and not old.enable:
            supported = (
                new.command_set == 0
                and new.arbitration == 0
                and new.page_bytes == MIN_PAGE_BYTES
                and (self.discovery or (new.sq_entry_log2 == 6 and new.cq_entry_log2 == 4))
            )
            if self.phase is ControllerPhase.SHUT_DOWN:
                self._step(ControllerEvent.DISABLE)  # it was shut down without ever having been enabled
            if self.phase is ControllerPhase.DISABLED:
                self._step(ControllerEvent.ENABLE if supported else ControllerEvent.ENABLE_BAD)
        return Reply()

    def _reset(self) -> None:
        """CC.EN went to 0: the I/O queues are deleted; the admin queue stays (Base 3.7.2)."""
        self._step(ControllerEvent.DISABLE)
        for queue_id, connection in list(self.queues.items()):
            if queue_id:
                del self.queues[queue_id]
                connection.end("the controller was reset")
        for cid in self._event_cids:
            self.admin_connection.reply(cid, Reply(Status.ABORTED_SQ_DELETION))
        self._event_cids.clear()
        self._events.clear()
        self._masked.clear()
        self.changed_namespaces.clear()
        self.features = controller_admin.default_features(self)

    def shutdown_done(self) -> None:
        """Everything is durable: CSTS.SHST says so (Base 3.6.1)."""
        self._step(ControllerEvent.SHUTDOWN_DONE)

    # ---- admin commands --------------------------------------------------------------------------------------

    def admin(self, entry: SubmissionEntry, capsule_bytes: int, now_ns: int) -> Reply | None:
        """Answer an admin command; None: it is answered later (an async event request)."""
        return controller_admin.answer(self, entry, capsule_bytes, now_ns)

    def set_keep_alive(self, kato_ms: int, now_ns: int) -> None:
        """Set Features, Keep Alive Timer."""
        self.keep_alive_ns = round_keep_alive(kato_ms, self.card.config.min_keep_alive_ns)
        self.last_alive_ns = now_ns

    def create_io_queue(self, queue_id: int, connection: ControllerConnection) -> None:
        """An I/O queue connected."""
        self.queues[queue_id] = connection

    # ---- async events ----------------------------------------------------------------------------------------

    def request_event(self, cid: int) -> Reply | None:
        """Asynchronous Event Request (Base 5.2): kept until there is an event."""
        if len(self._event_cids) >= MAX_ASYNC_EVENTS:
            return Reply(Status.ASYNC_EVENT_LIMIT_EXCEEDED)
        self._event_cids.append(cid)
        self._deliver()
        return None

    def abort_event(self, cid: int) -> bool:
        """Abort an event request; whether it was one."""
        if cid not in self._event_cids:
            return False
        self._event_cids.remove(cid)
        self.admin_connection.reply(cid, Reply(Status.ABORT_REQUESTED))
        return True

    @property
    def access(self) -> Access:
        """What this host may do with the namespace, by the way it came."""
        return self.card.access_at(self.admin_connection.portal)

    def access_changed(self) -> None:
        """Tell the host, if it asked for it; once until it reads the log (Base 5.2.1, 8.1)."""
        if self.features[FeatureId.ASYNC_EVENT_CONFIGURATION] & ASYNC_ACCESS_CHANGE:
            page = LogPageId.ASYMMETRIC_ACCESS
            self._events[page] = AsyncEventType.NOTICE | NoticeInfo.ANA_CHANGE << 8 | page << 16
            self._deliver()

    def namespace_changed(self, nsid: int) -> None:
        """Tell the host, if it asked for it; once until it reads the list (Base 5.2.1, 5.16.1.5)."""
        if nsid not in self.changed_namespaces and len(self.changed_namespaces) < MAX_CHANGED_NAMESPACES:
            self.changed_namespaces.append(nsid)
        if self.features[FeatureId.ASYNC_EVENT_CONFIGURATION] & ASYNC_NAMESPACE_ATTRIBUTE:
            result = (
                AsyncEventType.NOTICE | NoticeInfo.NAMESPACE_CHANGED << 8 | LogPageId.CHANGED_NAMESPACES << 16
            )
            self._events[LogPageId.CHANGED_NAMESPACES] = result
            self._deliver()

    def log_read(self, page: int) -> None:
        """The log page was read without Retain: its event may come again."""
        self._masked.discard(page)
        self._events.pop(page, None)
        if page == LogPageId.CHANGED_NAMESPACES:
            self.changed_namespaces.clear()

    def _deliver(self) -> None:
        for page in [page for page in self._events if page not in self._masked]:
            if not self._event_cids:
                return
            result = self._events.pop(page)
            self._masked.add(page)
            self.admin_connection.reply(self._event_cids.popleft(), Reply(dw0=result))
