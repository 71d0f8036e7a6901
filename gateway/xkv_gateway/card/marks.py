"""Recognises what others leave at the ends of a disk, so that a refusal can say what is there.

It only ever names things for people: whether a card may be written to is decided by its being blank, never by this list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.card.structure import Bytes

SOMETHING: Final = "data of an unknown kind"

_HEAD_MAGICS: Final[Sequence[tuple[str, int, bytes]]] = (
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("an ext2/ext3/ext4 file system", 1080, b"\x53\xef"),
    ("an XFS file system", 0, b"XFSB"),
    ("a btrfs file system", 0x10040, b"_BHRfS_M"),
    ("an F2FS file system", 1024, b"\x10\x20\xf5\xf2"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("a FAT file system", 54, b"FAT"),
    ("a FAT file system", 82, b"FAT32"),
    *(("an LVM physical volume", sector * 512 + 24, b"LVM2 001") for sector in range(4)),
    ("a Linux RAID member (md)", 0, b"\xfc\x4e\x2b\xa9"),
    ("a Linux RAID member (md)", 4096, b"\xfc\x4e\x2b\xa9"),
    ("Linux swap space", 4086, b"SWAPSPACE2"),
    ("Linux swap space", 4086, b"SWAP-SPACE"),
    ("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    ("an SPDK blobstore", 0, b"SPDKBLOB"),
)
"""What it is, offset from the beginning, magic."""
_BOOT_SIGNATURE: Final = (510, b"\x55\xaa")
_MD_MAGIC: Final = b"\xfc\x4e\x2b\xa9"
_SECTOR_BYTES: Final = 512
_MD_090_STEP: Final = 64 << 10


def recognise(head: Bytes, tail: Bytes, size_bytes: int) -> list[str]:
    """Return names of what is there, the most telling first; SOMETHING where it is not blank and bears no known mark.

    Args:
        head: the first bytes of the card, as many as are to be looked at (a MiB).
        tail: the last ones.
        size_bytes: of the card.
    """
    head, tail = bytes(head), bytes(tail)
    found = [name for name, offset, magic in _HEAD_MAGICS if head.startswith(magic, offset)]
    tail_offset = size_bytes - len(tail)
    ends = [tail.startswith(b"EFI PART", len(tail) - block_bytes) for block_bytes in (512, 4096)]
    if any(ends):
        found.append("a GPT partition table (its backup at the end)")
    places = (_md_10_offset(size_bytes), size_bytes // _MD_090_STEP * _MD_090_STEP - _MD_090_STEP)
    if any(at >= tail_offset and tail.startswith(_MD_MAGIC, at - tail_offset) for at in places):
        found.append("a Linux RAID member (md, at the end)")
    if not found and head.startswith(_BOOT_SIGNATURE[1], _BOOT_SIGNATURE[0]):
        found.append("an MBR partition table or boot sector")
    if not found and (any(head) or any(tail)):
        found.append(SOMETHING)
    return list(dict.fromkeys(found))


def _md_10_offset(size_bytes: int) -> int:
    """Where metadata version 1.0 is: 8 to 12 KiB before the end, on a 4 KiB boundary."""
    return ((size_bytes // _SECTOR_BYTES - 16) & ~7) * _SECTOR_BYTES
