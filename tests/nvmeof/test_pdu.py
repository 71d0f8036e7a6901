"""The PDU codec against bytes written down by hand from the figures of the specification."""

from __future__ import annotations

import pytest

from xkv_nvmeof import digest, pdu
from xkv_nvmeof.pdu import PLAIN, Pdu, PduType, WireFormat

DIGESTS = WireFormat(header_digest=True, data_digest=True, alignment_bytes=4)
SQE = bytes(range(64))
CQE = bytes(range(16))

GOLDEN: list[tuple[Pdu, WireFormat, str]] = [
    (pdu.ICReq(), PLAIN, "00 00 80 00 80000000 0000 00 00 00000000" + "00" * 112),
    (pdu.ICReq(32, True, True, 4), PLAIN, "00 00 80 00 80000000 0000 1f 03 03000000" + "00" * 112),
    (pdu.ICResp(2, True, False, 65536), PLAIN, "01 00 80 00 80000000 0000 01 01 00000100" + "00" * 112),
    (pdu.H2CTermReq(1, 2, b"\xaa\xbb"), PLAIN, "02 00 18 18 1a000000 0100 02000000" + "00" * 10 + "aabb"),
    (pdu.C2HTermReq(5, 0x01020304), PLAIN, "03 00 18 00 18000000 0500 04030201" + "00" * 10),
    (pdu.CapsuleCmd(SQE), PLAIN, "04 00 48 00 48000000" + SQE.hex()),
    (pdu.CapsuleCmd(SQE, 512), PLAIN, "04 00 48 48 48020000" + SQE.hex()),
    (
        pdu.CapsuleCmd(SQE, 512),
        WireFormat(alignment_bytes=128),
        "04 00 48 80 80020000" + SQE.hex() + "00" * 56,
    ),
    (pdu.CapsuleResp(CQE), PLAIN, "05 00 18 00 18000000" + CQE.hex()),
    (
        pdu.H2CData(0x1234, 0x5678, 4096, 512, True),
        PLAIN,
        "06 04 18 18 18020000 3412 7856 00100000 00020000 00000000",
    ),
    (pdu.C2HData(1, 0, 16, True, True), PLAIN, "07 0c 18 18 28000000 0100 0000 00000000 10000000 00000000"),
    (pdu.C2HData(1, 0, 16, False, False), PLAIN, "07 00 18 18 28000000 0100 0000 00000000 10000000 00000000"),
    (pdu.R2T(1, 2, 3, 4), PLAIN, "09 00 18 00 18000000 0100 0200 03000000 04000000 00000000"),
]


@pytest.mark.parametrize(("value", "wire", "expected"), GOLDEN, ids=lambda item: type(item).__name__)
def test_a_pdu_is_encoded_as_the_figure_says(value: Pdu, wire: WireFormat, expected: str) -> None:
    assert pdu.encode(value, wire).hex() == expected.replace(" ", "")


@pytest.mark.parametrize(("value", "wire", "_expected"), GOLDEN, ids=lambda item: type(item).__name__)
def test_a_decoded_pdu_is_the_encoded_one(value: Pdu, wire: WireFormat, _expected: str) -> None:
    data = pdu.encode(value, wire)
    size = value.data_bytes if isinstance(value, pdu.CapsuleCmd) else 0
    found = pdu.decode(PduType(data[0]), data, 0, size)
    if isinstance(value, pdu.H2CTermReq | pdu.C2HTermReq):
        # Its data comes behind the header, through framing.
        assert found == type(value)(value.fatal_status, value.field_offset_bytes)
    else:
        assert found == value


def test_digests_flag_their_pdus_and_count_in_their_length() -> None:
    data = pdu.encode(pdu.C2HData(1, 0, 16, True, False), DIGESTS)
    assert data[:8].hex() == "0707181c30000000"  # PDO 28 = 24 + 4, PLEN 48 = 28 + 16 + 4
    assert data[24:28] == digest.to_wire(digest.crc32c(data[:24]))
    assert pdu.encode(pdu.CapsuleResp(CQE), DIGESTS)[:8].hex() == "050118001c000000"
    assert pdu.encode(pdu.CapsuleCmd(SQE), DIGESTS)[:8].hex() == "040148004c000000"


def test_setup_and_termination_have_no_digest() -> None:
    for value in (pdu.ICReq(), pdu.ICResp(), pdu.H2CTermReq(1), pdu.C2HTermReq(1)):
        assert pdu.encode(value, DIGESTS) == pdu.encode(value)


def test_a_termination_carries_at_most_128_bytes_of_the_header() -> None:
    assert len(pdu.encode(pdu.H2CTermReq(1, 0, bytes(300)))) == 24 + 128


def test_the_digest_of_32_zero_bytes_is_the_published_one() -> None:
    assert digest.crc32c(bytes(32)) == 0x8A9136AA
    assert digest.crc32c(b"123456789") == 0xE3069283


def test_a_digest_over_pieces_is_the_digest_of_the_whole() -> None:
    data = bytes(range(256)) * 5
    pieces = [memoryview(data)[start : start + 77] for start in range(0, len(data), 77)]
    assert digest.crc32c_of(pieces) == digest.crc32c(data)
    assert digest.from_wire(digest.to_wire(0x01020304)) == 0x01020304
