"""Where a command goes, by queue and opcode: Connect, Fabrics, admin or I/O (Base 3.3, 6). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_nvmeof.controller_gate import is_step
from xkv_nvmeof.controller_io import Inbound, Judgement, execute, judge
from xkv_nvmeof.controller_types import Reply
from xkv_nvmeof.multipath import Access
from xkv_nvmeof.spec import CONNECT_DATA_BYTES, FABRICS_OPCODE, FabricsType, SglType, Status

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.controller import Controller
    from xkv_nvmeof.controller_connection import ControllerConnection
    from xkv_nvmeof.controller_types import IoCommand


_PATH_STATUS: Final = {
    Access.INACCESSIBLE: Status.ASYMMETRIC_ACCESS_INACCESSIBLE,
    Access.PERSISTENT_LOSS: Status.ASYMMETRIC_ACCESS_LOST,
    Access.CHANGE: Status.ASYMMETRIC_ACCESS_TRANSITION,
}
"""What an I/O command hears where the namespace cannot be used (Base 8.1.3)."""


def dispatch(connection: ControllerConnection, entry: SubmissionEntry, data: memoryview, now_ns: int) -> None:
    """Process a command; `data` came in its capsule."""
    fabrics = entry.opcode == FABRICS_OPCODE
    controller = connection.controller
    if controller is None:
        if fabrics and entry.fabrics_type == FabricsType.CONNECT:
            _connect(connection, entry, data, now_ns)
        else:
            connection.reply(entry.cid, Reply(Status.COMMAND_SEQUENCE_ERROR))
    elif (gate := connection.gate) is not None and (not gate.open or is_step(entry)):
        gate.arrived(entry, data)
    elif fabrics:
        _fabrics(connection, controller, entry)
    elif connection.queue_id == 0:
        reply = controller.admin(entry, len(data), now_ns)
        if reply is not None:
            connection.reply(entry.cid, reply)
    elif not controller.ready:
        connection.reply(entry.cid, Reply(Status.COMMAND_SEQUENCE_ERROR))
    else:
        _io(connection, entry, data)


def start(connection: ControllerConnection, cid: int, command: IoCommand | Status) -> None:
    """Hand a command to the shell, or refuse it."""
    if isinstance(command, Status):
        connection.card.count(None, command)
        connection.reply(cid, Reply(command))
    else:
        connection.hand_over(command)


def _connect(connection: ControllerConnection, entry: SubmissionEntry, data: memoryview, now_ns: int) -> None:
    if entry.sgl.kind != SglType.IN_CAPSULE_OFFSET or len(data) != CONNECT_DATA_BYTES:
        connection.reply(entry.cid, Reply(Status.DATA_SGL_LENGTH_INVALID))
    else:
        reply = connection.card.connect(connection, entry, data, now_ns)
        connection.sender.connect_reply(entry.cid, reply)


def _fabrics(connection: ControllerConnection, controller: Controller, entry: SubmissionEntry) -> None:
    if entry.fabrics_type == FabricsType.CONNECT:
        connection.reply(entry.cid, Reply(Status.COMMAND_SEQUENCE_ERROR))
    elif connection.queue_id == 0:
        connection.reply(entry.cid, controller.fabrics(entry))
    elif entry.fabrics_type == FabricsType.DISCONNECT:
        connection.reply(entry.cid, Reply())
        controller.disconnected(connection)
        connection.end("the host disconnected the queue")
    else:
        connection.reply(entry.cid, Reply(Status.INVALID_OPCODE))


def _io(connection: ControllerConnection, entry: SubmissionEntry, data: memoryview) -> None:
    card, config = connection.card, connection.card.config
    if card.guard.concerns(entry.opcode):
        card.guard.arrived(connection, entry, data)
        return
    judgement: Judgement = _PATH_STATUS.get(card.access_at(connection.portal), Status.SUCCESS)
    if not judgement:
        judgement = judge(entry, len(data), config)
    if not isinstance(judgement, Status) and card.guard.refuses(connection, entry.opcode):
        judgement = Status.RESERVATION_CONFLICT
    if not isinstance(judgement, Inbound):
        start(connection, entry.cid, judgement)
    elif data:
        start(connection, entry.cid, execute(entry, data, config, pooled=False))
    else:
        connection.transfers.begin(entry, judgement.length_bytes)
