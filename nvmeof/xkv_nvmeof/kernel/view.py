"""What Linux knows of NVMe: subsystems, their controllers, their namespaces. Pure: a model, and what is looked for in it.

Two sources make one: sysfs (`sysfs`), which the gateway goes by because it never blocks on a controller, and the JSON of
nvme-cli (`nvmecli`), for comparison.

A subsystem is one NQN, however many controllers lead to it. A namespace has one node, `nvme0n1`; the nodes of single paths,
`nvme0c1n1`, cannot be opened and are in no view. The number in a node's name is the subsystem's, not a controller's.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

LIVE: Final = "live"
_NODE: Final = re.compile(r"nvme[0-9]{1,9}n[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Controller:
    """One connection, or one PCIe device. What a source does not tell is empty."""

    name: str
    transport: str
    traddr: str
    trsvcid: str
    state: str
    host_nqn: str = ""
    host_id: str = ""
    """In lower case, without hyphens."""

    @property
    def live(self) -> bool:
        """Whether commands get through."""
        return self.state == LIVE


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace. `nguid` and `uuid` have 16 bytes, all zero where not reported; sizes are 0 while they are not known."""

    nsid: int
    node: str
    """Name under /dev."""
    size_bytes: int
    block_bytes: int
    nguid: bytes = bytes(16)
    uuid: bytes = bytes(16)


@dataclass(frozen=True, slots=True)
class Subsystem:
    """An NQN with all that leads to it and all that is behind it."""

    nqn: str
    controllers: tuple[Controller, ...]
    namespaces: tuple[Namespace, ...]
    model: str = ""
    serial: str = ""

    @property
    def live(self) -> bool:
        """Whether any controller is live."""
        return any(one.live for one in self.controllers)

    def is_last_way(self, name: str) -> bool:
        """Tell whether no other controller that is live leads to the namespaces."""
        return not any(one.live for one in self.controllers if one.name != name)


View = tuple[Subsystem, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """A connection as this host wants it: to which controller, and as which host. `traddr` is a numeric address."""

    nqn: str
    traddr: str
    port: int
    host_nqn: str
    host_id: bytes

    @property
    def address(self) -> str:
        """`ADDR:PORT`, IPv6 in brackets."""
        return f"[{self.traddr}]:{self.port}" if ":" in self.traddr else f"{self.traddr}:{self.port}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A namespace of a subsystem, and its ids where they are known."""

    nqn: str
    nsid: int
    nguid: bytes = b""
    uuid: bytes = b""


def is_namespace_node(name: str) -> bool:
    """Tell whether that is the node of a namespace: no hidden path, no partition, no controller."""
    return _NODE.fullmatch(name) is not None


def subsystem_of(view: View, nqn: str) -> Subsystem | None:
    """Return the subsystem of that NQN."""
    return next((one for one in view if one.nqn == nqn), None)


def same_address(one: str, other: str) -> bool:
    """Compare numeric addresses, whatever way they are written."""
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return bool(one) and one == other


def path_of(view: View, peer: Peer) -> Controller | None:
    """Return the connection that is exactly that one: controller, address, port and host; a live one first."""
    found = [
        one
        for one in _controllers_at(view, peer)
        if one.host_nqn == peer.host_nqn and one.host_id == peer.host_id.hex()
    ]
    return next((one for one in found if one.live), found[0] if found else None)


def strangers_at(view: View, peer: Peer) -> list[Controller]:
    """Return connections of this machine to the same controller, made as another host."""
    return [one for one in _controllers_at(view, peer) if one.host_nqn and one.host_nqn != peer.host_nqn]


def _controllers_at(view: View, peer: Peer) -> list[Controller]:
    subsystem = subsystem_of(view, peer.nqn)
    return [
        one
        for one in (() if subsystem is None else subsystem.controllers)
        if one.transport == "tcp" and one.trsvcid == str(peer.port) and same_address(one.traddr, peer.traddr)
    ]


def half_identities(view: View, peer: Peer) -> list[str]:
    """Return NQNs or ids of hosts that share one half of this host's identity: Linux refuses such a pair."""
    clashes = []
    for one in (one for subsystem in view for one in subsystem.controllers):
        if not one.host_nqn or not one.host_id:
            continue
        if (one.host_nqn == peer.host_nqn) != (one.host_id == peer.host_id.hex()):
            clashes.append(f"{one.name} is connected as {one.host_nqn} with the id {one.host_id}")
    return clashes


def namespace_of(view: View, wanted: Wanted) -> Namespace | None:
    """Return the namespace once it is whole: there, with a size, and with the ids that are known."""
    subsystem = subsystem_of(view, wanted.nqn)
    for one in () if subsystem is None else subsystem.namespaces:
        if (
            one.nsid == wanted.nsid
            and one.size_bytes
            and one.block_bytes
            and wanted.nguid in (b"", one.nguid)
            and wanted.uuid in (b"", one.uuid)
        ):
            return one
    return None
