"""Log pages: discovery (Base 5.16.1.23), SMART / Health (5.16.1.3), asymmetric namespace access (5.16.1.13)."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DISCOVERY_HEADER_BYTES: Final = 1024
DISCOVERY_ENTRY_BYTES: Final = 1024
SMART_BYTES: Final = 512
SMART_DATA_UNIT_BYTES: Final = 512_000
"""One data unit of the SMART page: a thousand 512-byte units."""
MAX_DISCOVERY_ENTRIES: Final = 1024
"""Most entries that a reader believes; a longer log is refused."""

_HEADER: Final = Struct("<QQH1006x")
_ENTRY: Final = Struct("<BBBBHHHH20x32s192x256s256sB255x")
_SMART: Final = Struct("<BHBBB26x16s16s16s16s32x16s16x16s16s320x")
assert _HEADER.size == DISCOVERY_HEADER_BYTES
assert _ENTRY.size == DISCOVERY_ENTRY_BYTES
assert _SMART.size == SMART_BYTES

TRTYPE_TCP: Final = 3
ADRFAM_IPV4: Final = 1
ADRFAM_IPV6: Final = 2
SUBTYPE_REFERRAL: Final = 1
SUBTYPE_NVM: Final = 2
SUBTYPE_CURRENT_DISCOVERY: Final = 3
TREQ_NOT_REQUIRED: Final = 2
"""Secure channel not required (Base Figure 264, TREQ bits 1:0 = 10b)."""


class LogFormatError(ValueError):
    """Bytes that are no well-formed log page. The controller is at fault."""


@dataclass(frozen=True, slots=True)
class DiscoveryHeader:
    """Header of the discovery log page, 1024 bytes."""

    generation: int
    record_count: int
    record_format: int = 0

    def to_bytes(self) -> bytes:
        """Encode."""
        return _HEADER.pack(self.generation, self.record_count, self.record_format)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> DiscoveryHeader:
        """Decode the first 1024 bytes of the page.

        Raises:
            LogFormatError: too short, an unknown record format, or more records than any reader believes.
        """
        if len(data) < DISCOVERY_HEADER_BYTES:
            raise LogFormatError(f"a discovery log of {len(data)} bytes")
        header = cls(*_HEADER.unpack_from(data))
        if header.record_format != 0 or header.record_count > MAX_DISCOVERY_ENTRIES:
            raise LogFormatError("a discovery log of unknown format, or with too many records")
        return header


@dataclass(frozen=True, slots=True)
class DiscoveryEntry:
    """One record of the discovery log page, 1024 bytes (Base Figure 264)."""

    subnqn: str
    address: str
    service: str
    address_family: int = ADRFAM_IPV4
    subsystem_type: int = SUBTYPE_NVM
    transport: int = TRTYPE_TCP
    requirements: int = TREQ_NOT_REQUIRED
    port_id: int = 1
    cntlid: int = 0xFFFF
    admin_queue_entries: int = 32
    flags: int = 0
    security: int = 0

    def to_bytes(self) -> bytes:
        """Encode, 1024 bytes; address and service are padded with spaces as ASCII fields are (Base 1.4.2)."""
        return _ENTRY.pack(
            self.transport,
            self.address_family,
            self.subsystem_type,
            self.requirements,
            self.port_id,
            self.cntlid,
            self.admin_queue_entries,
            self.flags,
            self.service.encode("ascii").ljust(32),
            self.subnqn.encode(),
            self.address.encode("ascii").ljust(256),
            self.security,
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> DiscoveryEntry:
        """Decode exactly 1024 bytes.

        Raises:
            LogFormatError: the length is wrong.
        """
        if len(data) != DISCOVERY_ENTRY_BYTES:
            raise LogFormatError(f"a discovery record of {len(data)} bytes")
        values = _ENTRY.unpack(data)
        transport, family, kind, requirements, port_id, cntlid, entries, flags, *texts, security = values
        service, subnqn, address = (text.rstrip(b" \0").decode(errors="replace") for text in texts)
        return cls(
            subnqn,
            address,
            service,
            family,
            kind,
            transport,
            requirements,
            port_id,
            cntlid,
            entries,
            flags,
            security,
        )


@dataclass(frozen=True, slots=True)
class SmartLog:
    """SMART / Health information, 512 bytes: the fields that a card without flash can tell."""

    read_bytes: int
    written_bytes: int
    read_commands: int
    write_commands: int
    temperature_kelvin: int = 300
    critical_warning: int = 0
    available_spare_percent: int = 100
    spare_threshold_percent: int = 10
    used_percent: int = 0
    media_errors: int = 0

    def to_bytes(self) -> bytes:
        """Encode. Data units are rounded up, as the specification asks."""
        counts = (
            -(-self.read_bytes // SMART_DATA_UNIT_BYTES),
            -(-self.written_bytes // SMART_DATA_UNIT_BYTES),
            self.read_commands,
            self.write_commands,
            0,
            self.media_errors,
            0,
        )
        return _SMART.pack(
            self.critical_warning,
            self.temperature_kelvin,
            self.available_spare_percent,
            self.spare_threshold_percent,
            self.used_percent,
            *(count.to_bytes(16, "little") for count in counts),
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> SmartLog:
        """Decode 512 bytes; byte counts are in whole data units.

        Raises:
            LogFormatError: the length is wrong.
        """
        if len(data) != SMART_BYTES:
            raise LogFormatError(f"a SMART log of {len(data)} bytes")
        warning, kelvin, spare, threshold, used, *counts = _SMART.unpack(data)
        read_units, written_units, reads, writes, _hours, media, _entries = (
            int.from_bytes(count, "little") for count in counts
        )
        return cls(
            read_units * SMART_DATA_UNIT_BYTES,
            written_units * SMART_DATA_UNIT_BYTES,
            reads,
            writes,
            kelvin,
            warning,
            spare,
            threshold,
            used,
            media,
        )


ACCESS_HEADER_BYTES: Final = 16
ACCESS_GROUP_BYTES: Final = 32
ACCESS_GROUPS_ONLY: Final = 1
"""Log specific field: without the lists of namespaces (RGO)."""
_ACCESS_HEADER: Final = Struct("<QH6x")
_ACCESS_GROUP: Final = Struct("<IIQB15x")


@dataclass(frozen=True, slots=True)
class AccessGroup:
    """The access that a controller gives to the namespaces of one group: `state` as on the wire, perhaps unknown."""

    group: int
    state: int
    change_count: int = 0


def encode_access_log(change_count: int, groups: Sequence[AccessGroup], nsids: Sequence[int] = ()) -> bytes:
    """Encode the log page, with `nsids` as the namespaces of each group."""
    listed = b"".join(nsid.to_bytes(4, "little") for nsid in nsids)
    body = b"".join(
        _ACCESS_GROUP.pack(one.group, len(nsids), one.change_count, one.state) + listed for one in groups
    )
    return _ACCESS_HEADER.pack(change_count, len(groups)) + body


def decode_access_log(data: bytes | bytearray | memoryview) -> list[AccessGroup]:
    """Decode the log page, as far as it was read; lists of namespaces are passed over.

    Raises:
        LogFormatError: too short for the groups that it announces, as far as whole groups were asked for.
    """
    if len(data) < ACCESS_HEADER_BYTES:
        raise LogFormatError(f"an access log of {len(data)} bytes")
    _changes, count = _ACCESS_HEADER.unpack_from(data)
    groups: list[AccessGroup] = []
    at = ACCESS_HEADER_BYTES
    for _ in range(count):
        if at + ACCESS_GROUP_BYTES > len(data):
            raise LogFormatError(f"an access log of {len(data)} bytes with {count} groups")
        group, namespaces, change_count, state = _ACCESS_GROUP.unpack_from(data, at)
        groups.append(AccessGroup(group, state & 0xF, change_count))
        at += ACCESS_GROUP_BYTES + 4 * namespaces
    return groups
