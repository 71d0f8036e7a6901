"""The storage networks: targets are reached inside them only, and nothing else of the gateway is. Pure.

A network for storage alone keeps a card apart from whoever can reach the gateway: whoever is on it can talk to the target. So
both directions are judged, and always by addresses as they are used, never by names.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from xkv_gateway.errors import FabricRefusedError
from xkv_rpc.addresses import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable


class StorageNetworks:
    """`[fabric] networks`.

    Args:
        networks: such as 10.20.0.0/24; none: targets are on loopback.

    Raises:
        ValueError: one of them is none.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = tuple(map(ipaddress.ip_network, networks))

    def __bool__(self) -> bool:
        return bool(self._networks)

    @property
    def on_loopback(self) -> bool:
        """Whether all of them are on this host; so it is without networks."""
        return all(network.is_loopback for network in self._networks)

    def holds(self, ip: str) -> bool:
        """Return whether the address is inside one of the networks; never without networks.

        Raises:
            ValueError: it is no IP address.
        """
        address = ipaddress.ip_address(ip.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def admits_target(self, ip: str) -> bool:
        """Return whether a target may be at this address. Raises ValueError: it is no IP address."""
        return self.holds(ip) if self._networks else is_loopback(ip)

    def judge_target(self, ip: str, what: str) -> None:
        """Refuse `what`, which is at this address, where no target may be.

        Raises:
            FabricRefusedError: the address is not admitted.
        """
        if not self.admits_target(ip):
            raise FabricRefusedError(
                f"{what}: {self.refusal(ip)}",
                advice='Name the network, if it is one: [fabric] networks = ["..."].',
            )

    def refusal(self, what: str) -> str:
        """Return why `what`, an address that is not admitted, is refused."""
        if not self._networks:
            return f"{what} is not on loopback, and no storage network is configured ([fabric] networks)"
        return f"{what} is outside of the storage networks ({', '.join(map(str, self._networks))})"
