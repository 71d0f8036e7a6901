"""Where the gateway listens: addresses are judged before anything is bound, and again as they were really bound.

Where nobody is authenticated, only 127.0.0.0/8 and ::1 may be used, unless the operator has written down that a port may be
open. Names are resolved once; the result is judged, and the result is what is bound.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from typing import Final

from xkv_gateway.errors import AddressInUseError, BindRefusedError, ConfigError, GatewayError
from xkv_gateway.networks import StorageNetworks
from xkv_rpc.addresses import host_port, is_loopback

__all__ = [
    "BindAddress",
    "bind_error",
    "bind_tcp",
    "host_port",
    "is_loopback",
    "judge_bind",
    "judge_bound",
    "resolve_bind",
]

NO_STORAGE_NETWORKS: Final = StorageNetworks()
UNSPECIFIED: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound
ADMIN_BACKLOG: Final = 64
"""Connections that wait to be accepted; operators and scrapers are few."""


@dataclass(frozen=True, slots=True)
class BindAddress:
    """An address that has been judged and may be bound."""

    asked: str
    """As written in the configuration: an address or a name."""
    ip: str
    port: int

    @property
    def text(self) -> str:
        """`ADDRESS:PORT`, IPv6 in brackets."""
        return host_port(self.ip, self.port)

    def collides(self, other: BindAddress) -> bool:
        """Tell whether both cannot be bound: one port, in one place or in all places."""
        ips = {self.ip, other.ip}
        return self.port == other.port != 0 and (len(ips) == 1 or not ips.isdisjoint(UNSPECIFIED))


def judge_bind(
    host: str,
    port: int,
    *,
    section: str,
    allow_unauthenticated: bool,
    storage: StorageNetworks = NO_STORAGE_NETWORKS,
) -> BindAddress:
    """Return the address to bind for `[section] bind_address = host`.

    Raises:
        ConfigError: the name does not resolve.
        BindRefusedError: an address outside of loopback without the permission, or one in a storage network.
    """
    addresses = _resolve_outside(host, port, section, storage)
    outside = [ip for ip in addresses if not is_loopback(ip)]
    if outside and not allow_unauthenticated:
        raise _refused(host, outside[0], section)
    return BindAddress(asked=host, ip=addresses[0], port=port)


def judge_bound(asked: str, bound: str, *, section: str, allow_unauthenticated: bool) -> None:
    """Judge once more, by what the kernel says was bound (`IP:PORT`). Raises BindRefusedError."""
    ip = bound.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if not allow_unauthenticated and not is_loopback(ip):
        raise _refused(asked, ip, section)


def resolve_bind(
    host: str, port: int, *, section: str, storage: StorageNetworks = NO_STORAGE_NETWORKS
) -> BindAddress:
    """Return the address to bind where it does not matter who else reaches it. Raises as `judge_bind`."""
    return BindAddress(asked=host, ip=_resolve_outside(host, port, section, storage)[0], port=port)


def _resolve_outside(host: str, port: int, section: str, storage: StorageNetworks) -> list[str]:
    addresses = _resolve(host, port, section)
    for ip in addresses:
        if storage.holds(ip):
            raise BindRefusedError(
                f"{section}.bind_address: refusing to listen on {ip}: it is inside the storage network",
                advice="Only targets are there. Use another address, or take it out of [fabric] networks.",
            )
    return addresses


_WAYS_OUT: Final = {
    "control": "Use 127.0.0.1 or ::1; or let clients with keys in from there: `xkv-gateway keys init`, and [control.curve]"
    " bind_address = {host}; or",
    "admin": "Use 127.0.0.1 or ::1; or ask for a token: [admin] token_file = FILE; or",
}


def _refused(host: str, ip: str, section: str) -> BindRefusedError:
    resolved = "" if ip == host else f" (which is {ip})"
    return BindRefusedError(
        f"refusing to listen on {host}{resolved}: it can be reached from other machines,"
        " and nobody is authenticated there",
        advice=f"{_WAYS_OUT[section].format(host=repr(host))} write [{section}] allow_unauthenticated = true"
        " into the configuration file if everybody who reaches that address may use it.",
    )


def _resolve(host: str, port: int, section: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(
            f"{section}.bind_address: cannot resolve {host!r}: {reason}",
            advice="Write an IP address, without brackets.",
        ) from None
    return [str(entry[4][0]) for entry in found]


def bind_tcp(address: BindAddress, *, section: str) -> socket.socket:
    """Return a non-blocking listening socket.

    Raises:
        AddressInUseError: somebody listens there.
        GatewayError: any other reason, in words.
    """
    family = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.ip, address.port))
        listener.listen(ADMIN_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise bind_error(address, error.errno or 0, section=section) from None
    return listener


def bind_error(address: BindAddress, number: int, *, section: str, detail: str = "") -> GatewayError:
    """Return the error for people of a bind that failed with errno `number` (0: only `detail` says why)."""
    flag = {"control": "--port", "admin": "--admin-port"}.get(section, f"{section}.port")
    match number:
        case errno.EADDRINUSE:
            return AddressInUseError(
                f"{address.text} ({section} port) is already in use",
                advice="Another gateway probably runs there: `xkv-gateway status` tells. "
                f"To run a second one, choose other ports (--port, --admin-port) and another --state-dir; {flag} is this one.",
            )
        case errno.EADDRNOTAVAIL:
            return ConfigError(
                f"{section}.bind_address: {address.asked} is not an address of this machine",
                advice="`ip address` lists them.",
            )
        case errno.EACCES:
            return ConfigError(
                f"{section}.port: no permission to listen on port {address.port}",
                advice="Ports below 1024 need privileges; choose a higher one.",
            )
    reason = os.strerror(number) if number else detail
    return ConfigError(f"cannot listen on {address.text} ({section} port): {reason}")
