from __future__ import annotations

import pytest

from xkv_gateway.card.marks import SOMETHING, recognise

MIB = 1 << 20
SIZE_BYTES = 256 * MIB

HEADS = {
    "GPT": (512, b"EFI PART"),
    "GPT partition table": (4096, b"EFI PART"),
    "ext4": (1080, b"\x53\xef"),
    "XFS": (0, b"XFSB"),
    "btrfs": (0x10040, b"_BHRfS_M"),
    "F2FS": (1024, b"\x10\x20\xf5\xf2"),
    "NTFS": (3, b"NTFS    "),
    "FAT": (82, b"FAT32   "),
    "LVM": (512 + 24, b"LVM2 001"),
    "RAID": (4096, b"\xfc\x4e\x2b\xa9"),
    "swap": (4086, b"SWAPSPACE2"),
    "LUKS": (0, b"LUKS\xba\xbe"),
    "SPDK": (0, b"SPDKBLOB"),
    "MBR": (510, b"\x55\xaa"),
}


def marked(offset: int, magic: bytes) -> bytes:
    head = bytearray(MIB)
    head[offset : offset + len(magic)] = magic
    return bytes(head)


@pytest.mark.parametrize("name", HEADS)
def test_what_others_leave_at_the_beginning_has_a_name(name: str) -> None:
    (found,) = recognise(marked(*HEADS[name]), bytes(MIB), SIZE_BYTES)
    assert name in found


@pytest.mark.parametrize(
    ("name", "from_end", "magic"),
    [
        ("GPT", 512, b"EFI PART"),
        ("GPT", 4096, b"EFI PART"),
        ("RAID", 8192, b"\xfc\x4e\x2b\xa9"),
        ("RAID", 65536, b"\xfc\x4e\x2b\xa9"),
    ],
)
def test_what_others_leave_at_the_end_has_a_name(name: str, from_end: int, magic: bytes) -> None:
    (found,) = recognise(bytes(MIB), marked(MIB - from_end, magic), SIZE_BYTES)
    assert name in found


def test_a_boot_sector_is_only_named_where_nothing_says_more() -> None:
    head = bytearray(marked(*HEADS["GPT"]))
    head[510:512] = b"\x55\xaa"
    assert recognise(head, bytes(MIB), SIZE_BYTES) == ["a GPT partition table"]


def test_a_single_bit_anywhere_is_something_and_zeroes_are_nothing() -> None:
    assert recognise(bytes(MIB), bytes(MIB), SIZE_BYTES) == []
    assert recognise(marked(700_001, b"\x01"), bytes(MIB), SIZE_BYTES) == [SOMETHING]
    assert recognise(bytes(MIB), marked(700_001, b"\x01"), SIZE_BYTES) == [SOMETHING]


def test_a_card_that_is_smaller_than_what_is_looked_at_is_no_problem() -> None:
    assert recognise(bytes(4096), bytes(4096), 4096) == []
    assert recognise(b"XFSB", b"XFSB", 4) == ["an XFS file system"]
