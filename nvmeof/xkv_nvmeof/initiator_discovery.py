"""The discovery client: which subsystems a discovery controller knows (Base 2.0, 3.1.2.3 and 5.16.1.23)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from xkv_nvmeof.host_settings import ClosedByHost
from xkv_nvmeof.initiator_association import Association, Host
from xkv_nvmeof.initiator_errors import ConnectFailed
from xkv_nvmeof.initiator_open import open_admin
from xkv_nvmeof.initiator_options import InitiatorOptions, TargetAddress
from xkv_nvmeof.logpages import (
    DISCOVERY_ENTRY_BYTES,
    DISCOVERY_HEADER_BYTES,
    DiscoveryEntry,
    DiscoveryHeader,
    LogFormatError,
)
from xkv_nvmeof.spec import DISCOVERY_NQN, LogPageId

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_nvmeof.initiator_admin import AdminChannel

_ATTEMPTS: Final = 4
"""How often the log is read anew when it changes under the reader."""
_ENTRIES_A_READ: Final = 4
"""Keeps each read within 4096 bytes, which every controller can transfer."""


async def discover(
    host: str,
    port: int,
    options: InitiatorOptions,
    *,
    clock: Callable[[], int],
    entropy: Callable[[int], bytes] = os.urandom,
) -> list[DiscoveryEntry]:
    """Return the records of the discovery log page of the controller at `host`:`port`.

    Raises:
        DeviceError: no connection, a refusal, or a malformed log; the message says which.
    """
    association = Association(Host(options, clock, entropy), TargetAddress(host, port, DISCOVERY_NQN))
    try:
        await open_admin(association, DISCOVERY_NQN, options.keep_alive_ms)
        assert association.admin is not None
        for _attempt in range(_ATTEMPTS):
            entries = await _read(association.admin)
            if entries is not None:
                return entries
        raise ConnectFailed("the discovery log changed each time it was read")
    except LogFormatError as error:
        raise ConnectFailed(f"{host}:{port}: {error}") from error
    finally:
        await association.shut_down()
        association.end(ClosedByHost("discovery is done"))


async def _read(admin: AdminChannel) -> list[DiscoveryEntry] | None:
    """Read the log; None when its generation changed meanwhile."""
    header = await _header(admin)
    entries: list[DiscoveryEntry] = []
    while len(entries) < header.record_count:
        count = min(_ENTRIES_A_READ, header.record_count - len(entries))
        offset = DISCOVERY_HEADER_BYTES + len(entries) * DISCOVERY_ENTRY_BYTES
        data = await admin.log_page(LogPageId.DISCOVERY, count * DISCOVERY_ENTRY_BYTES, offset)
        entries += [
            DiscoveryEntry.from_bytes(data[start : start + DISCOVERY_ENTRY_BYTES])
            for start in range(0, len(data), DISCOVERY_ENTRY_BYTES)
        ]
    return entries if await _header(admin) == header else None


async def _header(admin: AdminChannel) -> DiscoveryHeader:
    return DiscoveryHeader.from_bytes(await admin.log_page(LogPageId.DISCOVERY, DISCOVERY_HEADER_BYTES))
