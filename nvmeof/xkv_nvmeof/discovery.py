"""The discovery service of the controller side: its log page (Base 3.1.2.3, 5.16.1.23). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from xkv_nvmeof.logpages import (
    ADRFAM_IPV4,
    ADRFAM_IPV6,
    SUBTYPE_CURRENT_DISCOVERY,
    SUBTYPE_NVM,
    DiscoveryEntry,
    DiscoveryHeader,
)
from xkv_nvmeof.spec import DISCOVERY_NQN


@dataclass(frozen=True, slots=True)
class Portal:
    """Where a host reached the card: a numeric address and a TCP port."""

    address: str
    port: int

    @property
    def family(self) -> int:
        """ADRFAM of the address."""
        return ADRFAM_IPV6 if ":" in self.address else ADRFAM_IPV4


def discovery_log(portal: Portal, nqn: str) -> bytes:
    """Return the whole discovery log page: the discovery subsystem itself and the card, where the host found us.

    The generation counter stays 1: what a card offers does not change while it runs.
    """
    entries = [
        DiscoveryEntry(name, portal.address, str(portal.port), portal.family, kind)
        for name, kind in ((DISCOVERY_NQN, SUBTYPE_CURRENT_DISCOVERY), (nqn, SUBTYPE_NVM))
    ]
    return DiscoveryHeader(1, len(entries)).to_bytes() + b"".join(entry.to_bytes() for entry in entries)
