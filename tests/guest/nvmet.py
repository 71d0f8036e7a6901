"""The guest's own NVMe target: nvmet, set up through configfs, on RAM disks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Guest

ROOT: Final = "/sys/kernel/config/nvmet"


@dataclass(frozen=True)
class Target:
    """A subsystem with one namespace, at port 1 of the guest's target."""

    guest: Guest
    nqn: str
    port: int
    host_port: int
    """Where it is reached from outside of the guest."""
    uuid: UUID
    nguid: UUID = field(default_factory=uuid4)

    @property
    def link(self) -> str:
        """What makes the subsystem reachable."""
        return f"{ROOT}/ports/1/subsystems/{self.nqn}"

    def leave(self) -> None:
        """Be unreachable: connections end, and new ones are refused."""
        self.guest.sh(f"rm {self.link}")

    def come_back(self) -> None:
        """Be reachable again."""
        self.guest.sh(f"ln -s {ROOT}/subsystems/{self.nqn} {self.link}")


@contextlib.contextmanager
def serving(guest: Guest, nqn: str, *, port: int = 4420, disk: str = "/dev/ram0") -> Iterator[Target]:
    """Serve the disk as namespace 1 of `nqn` for the time of the block."""
    target = Target(guest, nqn, port, guest.forward(port), uuid4())
    subsystem = f"{ROOT}/subsystems/{nqn}"
    guest.sh(f"""
        mkdir -p {ROOT}/ports/1 {subsystem}/namespaces/1
        echo 1 > {subsystem}/attr_allow_any_host
        echo {disk} > {subsystem}/namespaces/1/device_path
        echo {target.uuid} > {subsystem}/namespaces/1/device_uuid
        echo {target.nguid} > {subsystem}/namespaces/1/device_nguid
        echo 1 > {subsystem}/namespaces/1/enable
        cd {ROOT}/ports/1
        echo tcp > addr_trtype; echo ipv4 > addr_adrfam; echo 0.0.0.0 > addr_traddr; echo {port} > addr_trsvcid
    """)
    try:
        target.come_back()
        yield target
    finally:
        guest.sh(f"""
            rm -f {target.link}
            echo 0 > {subsystem}/namespaces/1/enable
            rmdir {subsystem}/namespaces/1 {subsystem} {ROOT}/ports/1
        """)
