"""What an IP address is, the same on every Python: their own answers about mapped addresses differ."""

from __future__ import annotations

import ipaddress


def is_loopback(ip: str) -> bool:
    """Return whether `ip` is inside 127.0.0.0/8 or is ::1, also when written as an IPv4-mapped IPv6 address.

    Raises:
        ValueError: It is no IP address.
    """
    address = ipaddress.ip_address(ip)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
