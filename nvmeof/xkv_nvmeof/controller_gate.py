"""Keeps a queue shut until its host has authenticated itself (Base 6.1, 6.2, 8.13.2). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xkv_nvmeof.controller_io import inbound_status, outbound_status
from xkv_nvmeof.controller_types import AuthenticateCommand, Reply
from xkv_nvmeof.dhchap.controller import ControllerAuthentication
from xkv_nvmeof.dhchap.messages import MESSAGE_BYTES_MAX
from xkv_nvmeof.spec import AUTHENTICATION_PROTOCOL, FABRICS_OPCODE, FabricsType, Status

if TYPE_CHECKING:
    from xkv_nvmeof.command import SubmissionEntry
    from xkv_nvmeof.controller_connection import ControllerConnection
    from xkv_nvmeof.dhchap.controller import ControllerKeys

_STEPS: Final = frozenset({FabricsType.AUTHENTICATION_SEND, FabricsType.AUTHENTICATION_RECEIVE})


def is_step(entry: SubmissionEntry) -> bool:
    """Tell whether a command belongs to an authentication."""
    return entry.opcode == FABRICS_OPCODE and entry.fabrics_type in _STEPS


class Gate:
    """The authentication of one connected queue. It happens once: a second one on the queue is not spoken."""

    def __init__(self, connection: ControllerConnection, keys: ControllerKeys, nqns: tuple[str, str]) -> None:
        self._connection = connection
        self._session = ControllerAuthentication(keys, nqns)
        self._busy = False

    @property
    def open(self) -> bool:
        """Whether the host has authenticated itself."""
        return self._session.done

    def arrived(self, entry: SubmissionEntry, data: memoryview) -> None:
        """Process a command that came while the gate is shut, or that belongs to an authentication."""
        status = self._judge(entry, len(data))
        if status:
            self._connection.reply(entry.cid, Reply(status))
        elif entry.fabrics_type == FabricsType.AUTHENTICATION_RECEIVE:
            self._begin(AuthenticateCommand(entry.cid, lambda: self._give(entry.cdw11)))
        elif data:
            self.transferred(entry, bytes(data))
        else:
            self._connection.transfers.begin(entry, entry.cdw11)

    def transferred(self, entry: SubmissionEntry, message: bytes) -> None:
        """Take the message of an Authentication Send, all of which is there."""
        self._begin(AuthenticateCommand(entry.cid, lambda: self._take(message)))

    def finished(self, command: AuthenticateCommand) -> None:
        """A step is over: answer it; a failure that the host was told ends the association."""
        self._busy = False
        self._connection.reply(command.cid, command.reply)
        controller = self._connection.controller
        if self._session.failed and controller is not None:
            controller.end("the host did not authenticate itself")

    def _judge(self, entry: SubmissionEntry, capsule_bytes: int) -> Status:
        if not is_step(entry):
            return Status.AUTHENTICATION_REQUIRED
        if self._busy or self.open:
            return Status.COMMAND_SEQUENCE_ERROR
        length_bytes = entry.cdw11
        if entry.cdw10 & ~0xFF != AUTHENTICATION_PROTOCOL or not 0 < length_bytes <= MESSAGE_BYTES_MAX:
            return Status.INVALID_FIELD
        if entry.fabrics_type == FabricsType.AUTHENTICATION_SEND:
            return inbound_status(entry, capsule_bytes, length_bytes)
        return outbound_status(entry, capsule_bytes, length_bytes)

    def _begin(self, command: AuthenticateCommand) -> None:
        if self._busy:  # two messages were on their way at once
            self._connection.reply(command.cid, Reply(Status.COMMAND_SEQUENCE_ERROR))
            return
        self._busy = True
        self._connection.hand_over(command)

    def _take(self, message: bytes) -> Reply:
        self._session.take(message)
        return Reply()

    def _give(self, length_bytes: int) -> Reply:
        message = self._session.give()
        if len(message) > length_bytes:
            return Reply(Status.INVALID_FIELD)
        return Reply(data=message.ljust(length_bytes, b"\0"))
