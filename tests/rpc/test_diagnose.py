"""What is said about headers that cannot be decoded, wherever in them the fault is."""

from __future__ import annotations

import msgpack
import pytest

from xkv_rpc.codec import RequestDecoder
from xkv_rpc.diagnose import RequestRefusedError
from xkv_rpc.errors import ErrorCode
from xkv_rpc.messages import Limits

DECODER = RequestDecoder(Limits(keys=4))
FAULTS = {
    "an array in an array": b"\xa4keys\x91\x90",
    "too many keys": b"\xa4keys\x95" + b"\xc4\x01k" * 5,
    "a long key": b"\xa4keys\x91\xc5\x01\x01" + bytes(257),
    "an extension": b"\xa5extra\xc7\x04\x01abcd",
    "a map": b"\xa5extra\x81\xa1x\x81\xa1y\x01",
    "not UTF-8": b"\xa2ns\xa1\xff",
    "long text": b"\xa6client\xda\x04\x01" + b"x" * 1025,
    "an array for a name": b"\x90\x01",
}


def refusal(header: bytes) -> RequestRefusedError:
    with pytest.raises(RequestRefusedError) as caught:
        DECODER.decode(header, [])
    return caught.value


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_id_is_told_also_where_it_comes_behind_the_fault(fault: bytes) -> None:
    caught = refusal(b"\x84\xa1v\x01\xa2op\xa6lookup" + fault + b"\xa2id\x07")
    assert caught.request_id == 7
    assert caught.error.code in {ErrorCode.BAD_REQUEST, ErrorCode.TOO_LARGE}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_another_version_behind_the_fault_is_what_is_told(fault: bytes) -> None:
    caught = refusal(b"\x83" + fault + b"\xa2id\x07\xa1v\x02")
    assert (caught.request_id, caught.error.code) == (7, ErrorCode.UNSUPPORTED_VERSION)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_two_ids_around_a_fault_are_none(fault: bytes) -> None:
    assert refusal(b"\x84\xa2id\x07\xa1v\x01" + fault + b"\xa2id\x08").request_id is None


def test_what_cannot_be_passed_over_ends_the_search() -> None:
    deep = b"\xa4keys" + b"\x91" * 5000 + b"\xc0"
    assert refusal(b"\x83\xa1v\x01" + deep + b"\xa2id\x07").request_id is None
    assert refusal(b"\x83\xa1v\x01\xa4keys\xdd\xff\xff\xff\xff\xa2id\x07").request_id is None


def test_only_an_unsigned_integer_is_an_id() -> None:
    wrongs: tuple[object, ...] = (-1, True, 1.0, "7", None, [])
    for wrong in wrongs:
        header = {"v": 1, "keys": [[]], "id": wrong}
        assert refusal(msgpack.packb(header)).request_id is None


@pytest.mark.parametrize("version", [msgpack.ExtType(5, b"x"), [1], {"one": 1}, "1" * 2000, None])
def test_the_id_is_told_also_where_the_version_is_of_no_sane_type(version: object) -> None:
    caught = refusal(msgpack.packb({"v": version, "id": 7, "op": "ping"}))
    assert (caught.request_id, caught.error.code, caught.error.field) == (7, ErrorCode.BAD_REQUEST, "v")
