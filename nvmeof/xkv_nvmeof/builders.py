"""Builders of submission entries, one a command: what the host sends.

Each returns the entry as data; `SubmissionEntry.to_bytes` encodes it. Counts are one-based here and zero-based
on the wire.
"""

from __future__ import annotations

from typing import Final

from xkv_nvmeof.command import NO_DATA, Sgl, SubmissionEntry
from xkv_nvmeof.spec import AUTHENTICATION_PROTOCOL, FABRICS_OPCODE, AdminOpcode, FabricsType, IoOpcode

FUA: Final = 1 << 30
"""Force Unit Access, command dword 12 (NVM 3.2.4, 3.2.6, 3.2.8)."""
DEAC: Final = 1 << 25
"""Deallocate bit of Write Zeroes, command dword 12 (NVM 3.2.8)."""
DSM_DEALLOCATE: Final = 1 << 2
"""Attribute Deallocate of Dataset Management, command dword 11 (NVM 3.2.3)."""


def property_get(cid: int, offset: int, size_bytes: int) -> SubmissionEntry:
    """Fabrics Property Get of a 4 or 8 byte property (Base 6.6)."""
    attribute = 1 if size_bytes == 8 else 0
    return SubmissionEntry(FABRICS_OPCODE, cid, FabricsType.PROPERTY_GET, cdw10=attribute, cdw11=int(offset))


def property_set(cid: int, offset: int, size_bytes: int, value: int) -> SubmissionEntry:
    """Fabrics Property Set of a 4 or 8 byte property (Base 6.7)."""
    attribute = 1 if size_bytes == 8 else 0
    return SubmissionEntry(
        FABRICS_OPCODE,
        cid,
        FabricsType.PROPERTY_SET,
        cdw10=attribute,
        cdw11=int(offset),
        cdw12=value & 0xFFFF_FFFF,
        cdw13=value >> 32,
    )


def authentication_send(cid: int, length_bytes: int) -> SubmissionEntry:
    """Fabrics Authentication Send of a message of so many bytes (Base 6.2)."""
    return SubmissionEntry(
        FABRICS_OPCODE,
        cid,
        FabricsType.AUTHENTICATION_SEND,
        Sgl.transport(length_bytes),
        cdw10=AUTHENTICATION_PROTOCOL,
        cdw11=length_bytes,
    )


def authentication_receive(cid: int, length_bytes: int) -> SubmissionEntry:
    """Fabrics Authentication Receive of a message of at most so many bytes (Base 6.1)."""
    return SubmissionEntry(
        FABRICS_OPCODE,
        cid,
        FabricsType.AUTHENTICATION_RECEIVE,
        Sgl.transport(length_bytes),
        cdw10=AUTHENTICATION_PROTOCOL,
        cdw11=length_bytes,
    )


def identify(cid: int, cns: int, *, nsid: int = 0, cntid: int = 0, csi: int = 0) -> SubmissionEntry:
    """Identify: returns 4096 bytes (Base 5.17)."""
    return SubmissionEntry(
        AdminOpcode.IDENTIFY, cid, nsid, Sgl.transport(4096), cdw10=cns | cntid << 16, cdw11=csi << 24
    )


def set_features(cid: int, feature: int, value: int, *, save: bool = False) -> SubmissionEntry:
    """Set Features whose value is dword 11 (Base 5.27)."""
    return SubmissionEntry(AdminOpcode.SET_FEATURES, cid, cdw10=int(feature) | int(save) << 31, cdw11=value)


def get_features(cid: int, feature: int, *, select: int = 0) -> SubmissionEntry:
    """Get Features: current (0), default (1), saved (2) value or capabilities (3) (Base 5.15)."""
    return SubmissionEntry(AdminOpcode.GET_FEATURES, cid, cdw10=int(feature) | select << 8)


def get_log_page(
    cid: int,
    page: int,
    length_bytes: int,
    *,
    nsid: int = 0xFFFF_FFFF,
    offset_bytes: int = 0,
    retain: bool = False,
    specific: int = 0,
) -> SubmissionEntry:
    """Get Log Page; length and offset are multiples of 4 bytes (Base 5.16).

    `retain` leaves the event unread; `specific` is the log specific field.
    """
    dwords = length_bytes // 4 - 1
    return SubmissionEntry(
        AdminOpcode.GET_LOG_PAGE,
        cid,
        nsid,
        Sgl.transport(length_bytes),
        cdw10=int(page) | specific << 8 | int(retain) << 15 | (dwords & 0xFFFF) << 16,
        cdw11=dwords >> 16,
        cdw12=offset_bytes & 0xFFFF_FFFF,
        cdw13=offset_bytes >> 32,
    )


def async_event_request(cid: int) -> SubmissionEntry:
    """Asynchronous Event Request: completes when there is an event (Base 5.2)."""
    return SubmissionEntry(AdminOpcode.ASYNC_EVENT_REQUEST, cid)


def keep_alive(cid: int) -> SubmissionEntry:
    """Keep Alive (Base 5.18)."""
    return SubmissionEntry(AdminOpcode.KEEP_ALIVE, cid)


def abort(cid: int, sqid: int, target_cid: int) -> SubmissionEntry:
    """Abort of a command on queue `sqid` (Base 5.1)."""
    return SubmissionEntry(AdminOpcode.ABORT, cid, cdw10=sqid | target_cid << 16)


def _transfer(
    opcode: int, cid: int, nsid: int, sgl: Sgl, first_block: int, block_count: int, bits: int
) -> SubmissionEntry:
    low, high = first_block & 0xFFFF_FFFF, first_block >> 32
    return SubmissionEntry(opcode, cid, nsid, sgl, low, high, (block_count - 1) | bits)


def read(cid: int, nsid: int, first_block: int, block_count: int, sgl: Sgl) -> SubmissionEntry:
    """Read; `block_count` is one-based here, at most 65536 (NVM 3.2.4)."""
    return _transfer(IoOpcode.READ, cid, nsid, sgl, first_block, block_count, 0)


def write(
    cid: int, nsid: int, first_block: int, block_count: int, sgl: Sgl, *, force_unit_access: bool = False
) -> SubmissionEntry:
    """Write; `block_count` is one-based here, at most 65536 (NVM 3.2.6)."""
    bits = FUA if force_unit_access else 0
    return _transfer(IoOpcode.WRITE, cid, nsid, sgl, first_block, block_count, bits)


def write_zeroes(
    cid: int, nsid: int, first_block: int, block_count: int, *, deallocate: bool = False
) -> SubmissionEntry:
    """Write Zeroes; `deallocate` is the DEAC bit (NVM 3.2.8)."""
    bits = DEAC if deallocate else 0
    return _transfer(IoOpcode.WRITE_ZEROES, cid, nsid, NO_DATA, first_block, block_count, bits)


def flush(cid: int, nsid: int) -> SubmissionEntry:
    """Flush (Base 7.1)."""
    return SubmissionEntry(IoOpcode.FLUSH, cid, nsid)


def dataset_management(cid: int, nsid: int, range_count: int, sgl: Sgl) -> SubmissionEntry:
    """Dataset Management with the Deallocate attribute; the list of ranges is the data (NVM 3.2.3)."""
    return SubmissionEntry(
        IoOpcode.DATASET_MANAGEMENT, cid, nsid, sgl, cdw10=range_count - 1, cdw11=DSM_DEALLOCATE
    )
