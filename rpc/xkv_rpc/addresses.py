"""Addresses: what an IP address is, the same on every Python, whose own answers about mapped ones differ; endpoints; and SPDK's."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from xkv_rpc.errors import BadEndpointError


def is_loopback(ip: str) -> bool:
    """Return whether `ip` is inside 127.0.0.0/8 or is ::1, also when written as an IPv4-mapped IPv6 address.

    Raises:
        ValueError: It is no IP address.
    """
    address = ipaddress.ip_address(ip)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def host_port(host: str, port: int) -> str:
    """Return `HOST:PORT`, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class SpdkAddress:
    """Where a target takes orders: a Unix socket's path, or an IP address with a port."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        """Return it as the configuration writes it."""
        if self.port is None:
            return self.host
        return f"tcp://{host_port(self.host, self.port)}"


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return scheme and rest. Raises BadEndpointError where it is neither TCP nor a Unix socket."""
    scheme, _, rest = endpoint.partition("://")
    if scheme not in {"tcp", "ipc"} or not rest:
        raise BadEndpointError(endpoint, "neither tcp://ADDRESS:PORT nor ipc://PATH")
    return scheme, rest
