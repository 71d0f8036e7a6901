from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.replay.payload import KEY_BYTES, PayloadPattern, derive_keys

SIZES = st.sampled_from([1, 7, 8, 9, 63, 64, 65, 4096, 4099])


def payload(pattern: PayloadPattern, key: bytes) -> bytearray:
    data = bytearray(pattern.block_bytes)
    pattern.fill(key, memoryview(data))
    return data


def test_keys_are_32_bytes_and_differ_by_block_and_by_size() -> None:
    keys = [*derive_keys(range(1000), 4096), *derive_keys(range(1000), 8192), *derive_keys([2**64 - 1], 4096)]
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert len(set(keys)) == len(keys)


def test_the_derivation_of_keys_and_payloads_never_changes() -> None:
    key = derive_keys([7], 24)[0]
    assert key.hex() == "90050916bad42ee4a4e59e3ed0f6be77a3ed8f480d6cd4b7eeacc4774003189b"
    assert payload(PayloadPattern(24), key).hex() == "3fc8146d837c0e066460b0b7d04a568adf400096a289eae2"


@settings(derandomize=True, max_examples=50, deadline=None)
@given(SIZES, st.integers(0, 2**64 - 1))
def test_a_payload_verifies_under_its_own_key(size: int, hash_id: int) -> None:
    pattern = PayloadPattern(size)
    key = derive_keys([hash_id], size)[0]
    assert pattern.first_difference(key, memoryview(payload(pattern, key))) is None


@settings(derandomize=True, max_examples=100, deadline=None)
@given(SIZES, st.data())
def test_one_changed_byte_anywhere_is_found_where_it_is(size: int, data: st.DataObject) -> None:
    pattern = PayloadPattern(size)
    key = derive_keys([1], size)[0]
    block = payload(pattern, key)
    offset = data.draw(st.integers(0, size - 1))
    block[offset] ^= data.draw(st.integers(1, 255))
    assert pattern.first_difference(key, memoryview(block)) == offset


def test_blocks_of_other_keys_shifted_torn_and_swapped_ones_and_zeroes_are_found() -> None:
    size = 4096
    pattern = PayloadPattern(size)
    key, other = derive_keys([1, 2], size)
    right, wrong = payload(pattern, key), payload(pattern, other)
    sectors_swapped = right[512:1024] + right[:512] + right[1024:]
    for broken in (
        wrong,
        bytearray(size),
        right[1:] + right[:1],
        right[8:] + right[:8],
        right[: size // 2] + wrong[size // 2 :],
        right[: size - 512] + bytes(512),
        sectors_swapped,
    ):
        assert pattern.first_difference(key, memoryview(broken)) is not None


def test_a_block_of_another_length_is_never_equal() -> None:
    pattern = PayloadPattern(64)
    key = derive_keys([1], 64)[0]
    block = payload(pattern, key)
    assert pattern.first_difference(key, memoryview(block)[:40]) == 40
    assert pattern.first_difference(key, memoryview(block + b"x")) == 64
    assert pattern.first_difference(key, memoryview(b"")) == 0


def test_a_buffer_at_an_odd_address_works() -> None:
    pattern = PayloadPattern(4096)
    key = derive_keys([3], 4096)[0]
    room = memoryview(bytearray(4099))[3:]
    pattern.fill(key, room)
    assert pattern.first_difference(key, room) is None


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PayloadPattern(0)
