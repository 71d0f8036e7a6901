"""The card: the subsystem with its controllers, who may connect, and what became due (Base 3.3, 6.3). Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.command import CommandFormatError, ConnectCommand, ConnectData, SubmissionEntry
from xkv_nvmeof.controller import Controller, round_keep_alive
from xkv_nvmeof.controller_connection import ControllerConnection
from xkv_nvmeof.controller_guard import Guard
from xkv_nvmeof.controller_states import ControllerPhase
from xkv_nvmeof.controller_types import (
    MIN_ADMIN_ENTRIES,
    CardConfig,
    CardCounters,
    DeallocateCommand,
    FlushCommand,
    IoCommand,
    ReadCommand,
    Reply,
    WriteCommand,
    WriteZeroesCommand,
)
from xkv_nvmeof.multipath import Access
from xkv_nvmeof.spec import (
    CNTLID_DYNAMIC,
    DISCOVERY_NQN,
    NQN_MAX_BYTES,
    AuthenticationRequirement,
    ConnectAttribute,
    Status,
)

if TYPE_CHECKING:
    from xkv_nvmeof.controller_types import Buffers
    from xkv_nvmeof.discovery import Portal

_IN_DATA: Final = 1 << 16
"""IATTR: the invalid parameter is in the data, not in the entry (Base 6.3, Figure 383)."""
_HOSTID: Final = _IN_DATA | 0
_CNTLID: Final = _IN_DATA | 16
_SUBNQN: Final = _IN_DATA | 256
_HOSTNQN: Final = _IN_DATA | 512
_QID: Final = 42
_SQSIZE: Final = 44
_CATTR: Final = 46
_ATTRIBUTES: Final = int(ConnectAttribute.DISABLE_SQ_FLOW_CONTROL) | 3
"""Bits of CATTR that are defined: the priority class and SQ flow control (Base Figure 380)."""
_MAX_CNTLID: Final = 0xFFEF
_MEDIA: Final = 2
"""Status code type of media and data integrity errors."""


def _invalid(where: int) -> Reply:
    """Connect Invalid Parameters, with the place of the bad one."""
    return Reply(Status.CONNECT_INVALID_PARAMETERS, dw0=where)


def _connected(connection: ControllerConnection) -> Reply:
    """Success of a Connect, with the controller's id and whether authentication comes next."""
    assert connection.controller is not None
    requirement = (
        AuthenticationRequirement.NONE if connection.set_up else AuthenticationRequirement.TRANSACTION
    )
    return Reply(dw0=connection.controller.cntlid | requirement << 16)


class Card:
    """The NVM subsystem and the discovery subsystem that share the listening addresses."""

    def __init__(self, config: CardConfig) -> None:
        assert config.max_transfer_bytes & (config.max_transfer_bytes - 1) == 0
        self.config = config
        self.counters = CardCounters()
        self.guard = Guard(config.namespace.nsid, enabled=config.reservations)
        self._access: dict[Portal, Access] = {}
        self._connections: set[ControllerConnection] = set()
        self._controllers: dict[int, Controller] = {}
        self._next_cntlid = 1
        self._dirty: dict[ControllerConnection, None] = {}

    # ---- the shell's side ------------------------------------------------------------------------------------

    def open(self, buffers: Buffers, portal: Portal, now_ns: int) -> ControllerConnection | None:
        """A TCP connection was accepted at `portal`, our end of it. None: there are too many, close it."""
        if len(self._connections) >= self.config.max_connections:
            return None
        connection = ControllerConnection(self, buffers, portal, now_ns)
        self._connections.add(connection)
        self.counters.connections += 1
        return connection

    def take_dirty(self) -> list[ControllerConnection]:
        """Return the connections that have commands to execute, bytes to send or that ended; each once."""
        dirty = list(self._dirty)
        self._dirty.clear()
        return dirty

    def tick(self, now_ns: int) -> None:
        """End what is overdue: associations without keep-alive, connections without Connect."""
        for controller in list(self._controllers.values()):
            deadline_ns = controller.keep_alive_deadline_ns
            if deadline_ns is not None and now_ns >= deadline_ns:
                controller.end("the keep-alive timer expired")
        for connection in list(self._connections):
            if connection.set_up or now_ns < connection.setup_deadline_ns:
                continue
            if connection.controller is None:
                connection.end("no Connect in time")
            else:
                connection.controller.end("no authentication in time")

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do; None: never."""
        deadlines = [
            deadline_ns
            for controller in self._controllers.values()
            if (deadline_ns := controller.keep_alive_deadline_ns) is not None
        ]
        deadlines += [c.setup_deadline_ns for c in self._connections if not c.set_up and not c.ended]
        return min(deadlines, default=None)

    def shutdown(self, reason: str) -> None:
        """End all associations and connections."""
        for controller in list(self._controllers.values()):
            controller.end(reason)
        for connection in list(self._connections):
            connection.end(reason)

    def change_namespace(self, *, block_count: int | None = None, attached: bool | None = None) -> None:
        """Make the namespace larger or smaller, take it away or bring it back, and tell every host."""
        namespace = self.config.namespace
        if block_count is not None:
            namespace = replace(namespace, block_count=block_count)
        if attached is not None:
            namespace = replace(namespace, attached=attached)
        self.config = replace(self.config, namespace=namespace)
        self.namespace_changed()

    def access_at(self, portal: Portal) -> Access:
        """Return what hosts that came by a portal may do with the namespace."""
        return self._access.get(portal, Access.OPTIMIZED)

    def set_access(self, portal: Portal, access: Access) -> None:
        """Change what hosts that came by a portal may do with the namespace, and tell them (Base 8.1)."""
        assert self.config.access_reporting
        self._access[portal] = access
        for controller in self._controllers.values():
            if not controller.discovery and controller.admin_connection.portal == portal:
                controller.access_changed()

    def namespace_changed(self) -> None:
        """Tell every host that the attributes of the namespace changed."""
        for controller in self._controllers.values():
            if not controller.discovery:
                controller.namespace_changed(self.config.namespace.nsid)

    # ---- the connections' side -------------------------------------------------------------------------------

    def mark_dirty(self, connection: ControllerConnection) -> None:
        """The shell has something to do for the connection."""
        self._dirty[connection] = None

    def connection_lost(self, connection: ControllerConnection, *, unexpected: bool) -> None:
        """A TCP connection is gone: an I/O queue with it, and with the admin queue the association (Base 3.3.1).

        Linux ends in this way: it closes its I/O queues without Disconnect, and then shuts the controller down.
        """
        self._connections.discard(connection)
        self._dirty.pop(connection, None)
        controller = connection.controller
        if (
            controller is None
            or controller.queues.get(connection.queue_id) is not connection
            or not unexpected
        ):
            return
        if connection.queue_id:
            controller.disconnected(connection)
        else:
            over = controller.phase is ControllerPhase.SHUT_DOWN
            controller.end("the host is done" if over else "its admin connection was lost")

    def protocol_error(self, connection: ControllerConnection) -> None:
        """A connection ends with a TermReq: the association ends with it."""
        self.counters.protocol_errors += 1
        self.mark_dirty(connection)
        controller = connection.controller
        if controller is not None and controller.queues.get(connection.queue_id) is connection:
            controller.end("protocol error on a queue of the association")

    def forget(self, controller: Controller) -> None:
        """The association ended."""
        self._controllers.pop(controller.cntlid, None)

    def count(self, command: IoCommand | None, status: int) -> None:
        """Count a finished command; None: one that was refused."""
        counters = self.counters
        if status != Status.SUCCESS:
            counters.failed_commands += 1
            counters.media_errors += status >> 8 == _MEDIA
        elif isinstance(command, ReadCommand):
            counters.read_commands += 1
            counters.read_bytes += command.length_bytes
        elif isinstance(command, WriteCommand):
            counters.write_commands += 1
            counters.write_bytes += len(command.data)
        elif isinstance(command, FlushCommand):
            counters.flush_commands += 1
        elif isinstance(command, DeallocateCommand):
            counters.deallocate_commands += 1
        elif isinstance(command, WriteZeroesCommand):
            counters.write_zeroes_commands += 1

    # ---- Connect ---------------------------------------------------------------------------------------------

    def connect(
        self, connection: ControllerConnection, entry: SubmissionEntry, data: memoryview, now_ns: int
    ) -> Reply:
        """Judge a Connect and, when it is right, make the connection a queue (Base 6.3)."""
        command = ConnectCommand.from_entry(entry)
        if command.record_format != 0:
            return Reply(Status.CONNECT_INCOMPATIBLE_FORMAT)
        try:
            host = ConnectData.from_bytes(data)
        except CommandFormatError:
            return _invalid(_SUBNQN)
        refusal = self._judge_host(command, host)
        if refusal is not None:
            return refusal
        flow_control = not command.attributes & ConnectAttribute.DISABLE_SQ_FLOW_CONTROL
        if command.qid == 0:
            return self._connect_admin(connection, command, host, now_ns, flow_control=flow_control)
        return self._connect_io(connection, command, host, flow_control=flow_control)

    def _judge_host(self, command: ConnectCommand, host: ConnectData) -> Reply | None:
        """Judge what the admin and the I/O queues have in common; None: nothing is wrong."""
        if host.subnqn not in (self.config.nqn, DISCOVERY_NQN):
            return _invalid(_SUBNQN)
        if not host.hostnqn.startswith("nqn.") or len(host.hostnqn.encode()) > NQN_MAX_BYTES:
            return _invalid(_HOSTNQN)
        if not any(host.hostid):
            return _invalid(_HOSTID)
        allowed = self.config.allowed_hosts
        if allowed is not None and host.subnqn != DISCOVERY_NQN and host.hostnqn not in allowed:
            return Reply(Status.CONNECT_INVALID_HOST)
        if not 0 < command.sqsize < self.config.max_queue_entries:
            return _invalid(_SQSIZE)
        if command.attributes & ~_ATTRIBUTES:
            return _invalid(_CATTR)
        return None

    def _connect_admin(
        self,
        connection: ControllerConnection,
        command: ConnectCommand,
        host: ConnectData,
        now_ns: int,
        *,
        flow_control: bool,
    ) -> Reply:
        if host.cntlid != CNTLID_DYNAMIC:
            return _invalid(_CNTLID)
        if command.sqsize < MIN_ADMIN_ENTRIES - 1:
            return _invalid(_SQSIZE)
        if len(self._controllers) >= self.config.max_controllers:
            return Reply(Status.CONNECT_CONTROLLER_BUSY)
        while self._next_cntlid in self._controllers:
            self._next_cntlid = self._next_cntlid % _MAX_CNTLID + 1
        cntlid = self._next_cntlid
        self._next_cntlid = cntlid % _MAX_CNTLID + 1
        controller = Controller(
            self,
            connection,
            cntlid,
            host,
            keep_alive_ns=round_keep_alive(command.kato_ms, self.config.min_keep_alive_ns),
            now_ns=now_ns,
            discovery=host.subnqn == DISCOVERY_NQN,
        )
        self._controllers[cntlid] = controller
        self.counters.associations += 1
        connection.connected(controller, 0, command.sqsize + 1, flow_control=flow_control)
        return _connected(connection)

    def _connect_io(
        self,
        connection: ControllerConnection,
        command: ConnectCommand,
        host: ConnectData,
        *,
        flow_control: bool,
    ) -> Reply:
        controller = self._controllers.get(host.cntlid)
        if controller is None or controller.discovery or controller.host.subnqn != host.subnqn:
            return _invalid(_CNTLID)
        if controller.host.hostnqn != host.hostnqn:
            return _invalid(_HOSTNQN)
        if controller.host.hostid != host.hostid:
            return _invalid(_HOSTID)
        if not controller.ready:
            return Reply(Status.COMMAND_SEQUENCE_ERROR)
        if command.qid > controller.granted_io_queues:
            return _invalid(_QID)
        if command.qid in controller.queues:
            return Reply(Status.COMMAND_SEQUENCE_ERROR)
        controller.create_io_queue(command.qid, connection)
        connection.connected(controller, command.qid, command.sqsize + 1, flow_control=flow_control)
        return _connected(connection)
