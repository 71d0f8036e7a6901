"""Structures that Identify returns, 4096 bytes each (Base 5.17.2, NVM 4.1.5).

The layouts are tables of `offset, format, field`; bytes not named are reserved and zero.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from struct import Struct
from typing import Any, Final, Self

from xkv_nvmeof.spec import IDENTIFY_BYTES


class IdentifyFormatError(ValueError):
    """Bytes that are no well-formed Identify structure. The controller is at fault."""


Layout = tuple[tuple[int, Struct, str], ...]


def layout(*rows: tuple[int, str, str]) -> Layout:
    """Compile a table of `offset, format, field`."""
    return tuple((offset, Struct("<" + code), name) for offset, code, name in rows)


CONTROLLER_LAYOUT: Final = layout(
    (0, "H", "vendor_id"),
    (2, "H", "subsystem_vendor_id"),
    (4, "20s", "serial"),
    (24, "40s", "model"),
    (64, "8s", "firmware"),
    (76, "B", "multipath"),
    (77, "B", "mdts"),
    (78, "H", "cntlid"),
    (80, "I", "version"),
    (92, "I", "async_events"),
    (96, "I", "attributes"),
    (111, "B", "controller_type"),
    (256, "H", "admin_commands"),
    (258, "B", "abort_limit"),
    (259, "B", "async_event_limit"),
    (260, "B", "firmware_updates"),
    (261, "B", "log_attributes"),
    (262, "B", "error_log_entries"),
    (266, "H", "warning_temperature_kelvin"),
    (268, "H", "critical_temperature_kelvin"),
    (320, "H", "keep_alive_granularity"),
    (342, "B", "access_transition_s"),
    (343, "B", "access_capabilities"),
    (344, "I", "access_group_max"),
    (348, "I", "access_group_count"),
    (512, "B", "sq_entry_sizes"),
    (513, "B", "cq_entry_sizes"),
    (514, "H", "max_commands"),
    (516, "I", "namespace_count"),
    (520, "H", "nvm_commands"),
    (522, "H", "fused_operations"),
    (525, "B", "volatile_write_cache"),
    (526, "H", "atomic_write_blocks"),
    (528, "H", "atomic_power_fail_blocks"),
    (530, "B", "vendor_command_format"),
    (536, "I", "sgl_support"),
    (540, "I", "max_allowed_namespaces"),
    (768, "256s", "subnqn"),
    (1792, "I", "io_command_capsule_units"),
    (1796, "I", "io_response_capsule_units"),
    (1800, "H", "in_capsule_data_offset_units"),
    (1802, "B", "fabrics_attributes"),
    (1803, "B", "max_sgl_descriptors"),
    (1804, "H", "optional_fabrics_commands"),
)
NAMESPACE_LAYOUT: Final = layout(
    (0, "Q", "size_blocks"),
    (8, "Q", "capacity_blocks"),
    (16, "Q", "used_blocks"),
    (24, "B", "features"),
    (25, "B", "format_count"),
    (26, "B", "format_index"),
    (30, "B", "sharing"),
    (31, "B", "reservation_capabilities"),
    (33, "B", "deallocate_features"),
    (46, "H", "optimal_io_boundary_blocks"),
    (64, "H", "preferred_write_granularity"),
    (66, "H", "preferred_write_alignment"),
    (68, "H", "preferred_deallocate_granularity"),
    (70, "H", "preferred_deallocate_alignment"),
    (72, "H", "optimal_write_blocks"),
    (92, "I", "access_group"),
    (104, "16s", "nguid"),
    (120, "8s", "eui64"),
    (128, "256s", "formats"),
)
_SPACE_PADDED: Final = frozenset({"serial", "model", "firmware"})
_NUL_PADDED: Final = frozenset({"subnqn"})


def _check_length(data: bytes | bytearray | memoryview) -> None:
    if len(data) != IDENTIFY_BYTES:
        raise IdentifyFormatError(f"an Identify structure has {IDENTIFY_BYTES} bytes, not {len(data)}")


def _decode_text(name: str, raw: bytes) -> str:
    text = raw.split(b"\0", 1)[0] if name in _NUL_PADDED else raw.rstrip(b" \0")
    decoded = text.decode("utf-8" if name in _NUL_PADDED else "ascii", errors="replace")
    # They are for people; a controller that holds rubbish there works all the same.
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in decoded)


class _Structure:
    """Packs and unpacks a dataclass by its layout table."""

    __slots__ = ()
    LAYOUT: Layout = ()

    def to_bytes(self) -> bytes:
        """Encode, exactly 4096 bytes."""
        out = bytearray(IDENTIFY_BYTES)
        for offset, packer, name in self.LAYOUT:
            value = getattr(self, name)
            if isinstance(value, str):
                value = value.encode().ljust(packer.size, b" " if name in _SPACE_PADDED else b"\0")
            packer.pack_into(out, offset, value)
        return bytes(out)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Decode exactly 4096 bytes.

        Raises:
            IdentifyFormatError: the length is wrong, or a text field is no text.
        """
        _check_length(data)
        values: dict[str, Any] = {}
        for offset, packer, name in cls.LAYOUT:
            (value,) = packer.unpack_from(data, offset)
            values[name] = _decode_text(name, value) if name in _SPACE_PADDED | _NUL_PADDED else value
        return cls(**values)


@dataclass(frozen=True, slots=True)
class IdentifyController(_Structure):
    """Identify Controller (Base 5.17.2.1). Field values as on the wire; units of 16 bytes where `_units`."""

    LAYOUT = CONTROLLER_LAYOUT

    serial: str
    model: str
    firmware: str
    subnqn: str
    cntlid: int
    version: int
    mdts: int = 0
    """Largest transfer as a power of two of minimum pages; 0 = no limit."""
    controller_type: int = 1
    """1 I/O, 2 discovery."""
    vendor_id: int = 0
    subsystem_vendor_id: int = 0
    multipath: int = 0
    async_events: int = 0
    attributes: int = 0
    admin_commands: int = 0
    abort_limit: int = 0
    """Zero-based."""
    async_event_limit: int = 0
    """Zero-based."""
    firmware_updates: int = 0x03
    log_attributes: int = 0
    error_log_entries: int = 0
    """Zero-based."""
    warning_temperature_kelvin: int = 0
    critical_temperature_kelvin: int = 0
    keep_alive_granularity: int = 0
    """KAS, units of 100 ms."""
    access_transition_s: int = 0
    """ANATT."""
    access_capabilities: int = 0
    """ANACAP: bits 0 to 4 the states that are reported, bit 6 groups do not change while a namespace is attached."""
    access_group_max: int = 0
    access_group_count: int = 0
    sq_entry_sizes: int = 0x66
    cq_entry_sizes: int = 0x44
    max_commands: int = 0
    namespace_count: int = 0
    nvm_commands: int = 0
    """ONCS: bit 2 Dataset Management, bit 3 Write Zeroes, bit 5 reservations."""
    fused_operations: int = 0
    volatile_write_cache: int = 0
    """Bit 0: present. Bits 2:1 = 10b: Flush of the broadcast namespace is refused, 11b: is done."""
    atomic_write_blocks: int = 0
    atomic_power_fail_blocks: int = 0
    vendor_command_format: int = 0
    sgl_support: int = 0
    max_allowed_namespaces: int = 0
    io_command_capsule_units: int = 0
    """IOCCSZ: 64-byte entry plus in-capsule data."""
    io_response_capsule_units: int = 0
    in_capsule_data_offset_units: int = 0
    fabrics_attributes: int = 0
    max_sgl_descriptors: int = 0
    optional_fabrics_commands: int = 0

    def max_transfer_bytes(self, min_page_bytes: int) -> int | None:
        """Most bytes of one command, None when there is no limit (`min_page_bytes` from CAP.MPSMIN)."""
        return min_page_bytes << self.mdts if self.mdts else None

    @property
    def in_capsule_bytes(self) -> int:
        """Most data bytes in a command capsule of an I/O queue; none where they would not begin behind the entry (ICDOFF)."""
        if self.in_capsule_data_offset_units:
            return 0
        return max(0, self.io_command_capsule_units * 16 - 64)


_LBA_FORMAT: Final = Struct("<HBB")


@dataclass(frozen=True, slots=True)
class IdentifyNamespace(_Structure):
    """Identify Namespace of the NVM command set (NVM 4.1.5.1). Counts in blocks."""

    LAYOUT = NAMESPACE_LAYOUT

    size_blocks: int
    capacity_blocks: int
    used_blocks: int
    formats: bytes
    """64 LBA formats of 4 bytes: metadata bytes u16, log2 of block bytes u8, performance u8."""
    features: int = 0
    """Bit 0 thin provisioning, bit 4 the preferred granularities are valid."""
    format_count: int = 0
    """Zero-based."""
    format_index: int = 0
    sharing: int = 0
    reservation_capabilities: int = 0
    """RESCAP: bit 0 persists through power loss, bits 1 to 6 the types 1 to 6."""
    deallocate_features: int = 0
    """Bits 2:0 = 1: deallocated blocks read as zeroes; bit 3: Write Zeroes can deallocate."""
    optimal_io_boundary_blocks: int = 0
    preferred_write_granularity: int = 0
    preferred_write_alignment: int = 0
    preferred_deallocate_granularity: int = 0
    preferred_deallocate_alignment: int = 0
    optimal_write_blocks: int = 0
    access_group: int = 0
    """ANAGRPID; 0: asymmetric access is not reported."""
    nguid: bytes = bytes(16)
    eui64: bytes = bytes(8)

    @staticmethod
    def one_format(block_bytes: int) -> bytes:
        """A format table with a single format without metadata."""
        return _LBA_FORMAT.pack(0, block_bytes.bit_length() - 1, 0).ljust(256, b"\0")

    @property
    def _active_format(self) -> tuple[int, int, int]:
        index = (self.format_index & 0xF) | (self.format_index >> 5 & 3) << 4
        metadata, log2, performance = _LBA_FORMAT.unpack_from(self.formats, index * 4)
        return metadata, log2, performance

    @property
    def block_bytes(self) -> int:
        """Bytes of a logical block in the current format."""
        return 1 << self._active_format[1]

    @property
    def metadata_bytes(self) -> int:
        """Metadata bytes of each block in the current format."""
        return self._active_format[0]

    @property
    def deallocate_zeroes(self) -> bool:
        """Whether deallocated blocks certainly read as zeroes."""
        return self.deallocate_features & 7 == 1


assert {name for _, _, name in CONTROLLER_LAYOUT} == {field.name for field in fields(IdentifyController)}
assert {name for _, _, name in NAMESPACE_LAYOUT} == {field.name for field in fields(IdentifyNamespace)}

_NSIDS: Final = Struct("<1024I")


def encode_active_namespaces(nsids: list[int]) -> bytes:
    """Active Namespace ID list: at most 1024 ids in rising order (Base 5.17.2.2)."""
    assert len(nsids) <= 1024
    return _NSIDS.pack(*sorted(nsids), *[0] * (1024 - len(nsids)))


def decode_active_namespaces(data: bytes | bytearray | memoryview) -> list[int]:
    """Decode an Active Namespace ID list; it ends at the first zero.

    Raises:
        IdentifyFormatError: the length is wrong.
    """
    _check_length(data)
    nsids: list[int] = list(_NSIDS.unpack(data))
    return nsids[: nsids.index(0)] if 0 in nsids else nsids


_DESCRIPTOR: Final = Struct("<BB2x")
_NIDT_EUI64: Final = 1
_NIDT_NGUID: Final = 2
_NIDT_UUID: Final = 3
_NIDT_CSI: Final = 4
_NIDT_BYTES: Final = {_NIDT_EUI64: 8, _NIDT_NGUID: 16, _NIDT_UUID: 16, _NIDT_CSI: 1}


@dataclass(frozen=True, slots=True)
class NamespaceDescriptors:
    """Namespace Identification Descriptor list (Base 5.17.2.3). Ids that are not reported are all zero."""

    nguid: bytes = bytes(16)
    uuid: bytes = bytes(16)
    eui64: bytes = bytes(8)
    command_set: int | None = None

    def to_bytes(self) -> bytes:
        """Encode, exactly 4096 bytes."""
        parts = [
            (_NIDT_EUI64, self.eui64 if any(self.eui64) else b""),
            (_NIDT_NGUID, self.nguid if any(self.nguid) else b""),
            (_NIDT_UUID, self.uuid if any(self.uuid) else b""),
            (_NIDT_CSI, b"" if self.command_set is None else bytes([self.command_set])),
        ]
        body = b"".join(_DESCRIPTOR.pack(kind, len(value)) + value for kind, value in parts if value)
        return body.ljust(IDENTIFY_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> NamespaceDescriptors:
        """Decode exactly 4096 bytes; unknown descriptors are skipped.

        Raises:
            IdentifyFormatError: the length is wrong, or a descriptor is cut or has an impossible length.
        """
        _check_length(data)
        found: dict[int, bytes] = {}
        position = 0
        while position + _DESCRIPTOR.size <= IDENTIFY_BYTES:
            kind, size = _DESCRIPTOR.unpack_from(data, position)
            if size == 0:
                break
            position += _DESCRIPTOR.size
            if position + size > IDENTIFY_BYTES or size != _NIDT_BYTES.get(kind, size):
                raise IdentifyFormatError(f"namespace descriptor {kind} of {size} bytes")
            found[kind] = bytes(data[position : position + size])
            position += size
        command_set = found.get(_NIDT_CSI)
        return cls(
            nguid=found.get(_NIDT_NGUID, bytes(16)),
            uuid=found.get(_NIDT_UUID, bytes(16)),
            eui64=found.get(_NIDT_EUI64, bytes(8)),
            command_set=None if command_set is None else command_set[0],
        )
