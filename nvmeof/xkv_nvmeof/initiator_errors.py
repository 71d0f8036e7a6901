"""Failures of the initiator beyond those of the block device contract, and how wire failures become them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xkv_nvmeof.blockdev import CommandFailed, DeviceError, ReservationConflict
from xkv_nvmeof.host_settings import ConnectionLost, DeadlinePassed
from xkv_nvmeof.spec import Status, status_name

if TYPE_CHECKING:
    from xkv_nvmeof.dhchap.host import Fault


class ConnectFailed(DeviceError):  # noqa: N818
    """No association could be made; the message says with which address, at which step and why."""


class ConnectUnanswered(ConnectFailed):
    """Nobody is there, or whoever is does not answer, has no room, or ended the connection: it may be another thing in a moment."""


class ConnectRefused(ConnectFailed):
    """The controller refused with a status; `status` is status code type * 256 + status code."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class AuthenticationRefused(ConnectFailed):
    """Host and controller do not prove themselves to each other; `fault` says whose key it is, or what else."""

    def __init__(self, message: str, *, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


class IdentityChanged(ConnectFailed):
    """The namespace at the address is not the one that this device was opened with."""


class NamespaceUnusable(ConnectFailed):
    """The namespace does not exist, is empty, or has a format that cannot be used."""


class NamespaceShrunk(NamespaceUnusable):
    """The namespace has other blocks than when the device was opened."""


class DeviceBusy(DeviceError):  # noqa: N818
    """Too many calls wait already. The command was never sent: certainly not executed."""


def link_failed(what: str, failure: Exception | None, hint: str = "") -> ConnectFailed:
    """Return the error of a connection that ended before it was of use."""
    passing = isinstance(failure, ConnectionLost | DeadlinePassed)
    kind = ConnectUnanswered if passing else ConnectFailed
    return kind(f"{what}: {failure}{hint}")


def command_failed(what: str, status: int, *, do_not_retry: bool) -> CommandFailed:
    """Return the error of a completion with a status other than success."""
    kind = ReservationConflict if status == Status.RESERVATION_CONFLICT else CommandFailed
    return kind(
        f"{what}: {status_name(status)}",
        status_code_type=status >> 8,
        status_code=status & 0xFF,
        do_not_retry=do_not_retry,
    )
