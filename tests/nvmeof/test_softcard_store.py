"""The soft card's blocks and buffers, in this process."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_nvmeof.digest import crc32c
from xkv_nvmeof.softcard.pool import BufferPool, ConnectionBuffers
from xkv_nvmeof.softcard.store import Store, StoreError, StoreIdentity, new_identity, write_status
from xkv_nvmeof.spec import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 1 << 20


def entropy(count: int) -> bytes:
    return b"\xa5" * count


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "file":
        made = Store.open_file(tmp_path / "card.img", SIZE, None, entropy)
    else:
        made = Store.in_memory(SIZE, 4096, entropy)
    yield made
    made.close()


def content(store: Store, offset_bytes: int, length_bytes: int) -> bytes:
    view = memoryview(bytearray(length_bytes))
    store.read(offset_bytes, view)
    again = memoryview(bytearray(length_bytes))
    if store.read_now(offset_bytes, again):
        assert again == view
    return bytes(view)


@pytest.mark.parametrize("durable", [False, True])
def test_what_was_written_is_read(store: Store, durable: bool) -> None:
    store.write(4096, memoryview(b"ab" * 4096), durable=durable)
    store.flush()
    assert content(store, 0, 16384) == bytes(4096) + b"ab" * 4096 + bytes(4096)


@pytest.mark.parametrize("punch", [True, False])
def test_zeroed_ranges_read_as_zeroes_with_and_without_holes(store: Store, punch: bool) -> None:
    store._can_punch = punch
    store.write(0, memoryview(b"x" * SIZE), durable=False)
    before = store.used_bytes()
    store.zero(4096, SIZE - 8192)
    assert content(store, 0, SIZE) == b"x" * 4096 + bytes(SIZE - 8192) + b"x" * 4096
    if punch:
        assert store.used_bytes() < before


def test_a_new_file_is_sparse_and_its_trailer_survives_zeroing(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    store = Store.open_file(path, 1 << 30, 512, entropy)
    assert path.stat().st_blocks * 512 < 1 << 20
    assert path.stat().st_mode & 0o077 == 0
    store.zero((1 << 30) - 4096, 4096)
    store.close()
    again = Store.open_file(path, None, None, os.urandom)
    assert again.identity == store.identity
    assert again.identity.block_bytes == 512
    again.close()


def test_a_uuid_is_a_random_one_of_version_4() -> None:
    identity = new_identity(SIZE, 4096, os.urandom)
    assert identity.uuid[6] >> 4 == 4
    assert identity.uuid[8] >> 6 == 2
    assert identity != new_identity(SIZE, 4096, os.urandom)


def test_every_damaged_byte_of_the_trailer_is_noticed() -> None:
    data = new_identity(SIZE, 4096, entropy).to_bytes()
    assert StoreIdentity.from_bytes(data).to_bytes() == data
    for at in [*range(64), 1000, 4091, *range(4092, 4096)]:
        damaged = bytearray(data)
        damaged[at] ^= 0x40
        with pytest.raises(StoreError):
            StoreIdentity.from_bytes(bytes(damaged))


@pytest.mark.parametrize(("at", "value"), [(8, 2), (12, 7), (16, 3)])
def test_a_trailer_from_elsewhere_is_refused(at: int, value: int) -> None:
    data = bytearray(new_identity(SIZE, 4096, entropy).to_bytes())
    data[at] = value
    data[4092:] = crc32c(data[:4092]).to_bytes(4, "little")
    with pytest.raises(StoreError):
        StoreIdentity.from_bytes(bytes(data))


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device"])
def test_what_is_no_regular_file_is_neither_waited_for_nor_written_to(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "card.img"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path(os.devnull)
        if kind == "link to a device":
            path = tmp_path / "card.img"
            path.symlink_to(os.devnull)
    with pytest.raises(OSError, match="no regular file"):
        Store.open_file(path, SIZE, None, entropy)
    with pytest.raises(OSError, match="no regular file"):
        Store.open_read_only(path)


def test_a_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    Store.open_file(path, SIZE, None, entropy).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_shorter_than_its_trailer_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    path.write_bytes(new_identity(SIZE, 4096, entropy).to_bytes())
    with pytest.raises(StoreError, match="longer or shorter"):
        Store.open_file(path, None, None, entropy)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ENOSPC, Status.CAPACITY_EXCEEDED),
        (errno.EDQUOT, Status.CAPACITY_EXCEEDED),
        (errno.EFBIG, Status.CAPACITY_EXCEEDED),
        (errno.EIO, Status.WRITE_FAULT),
    ],
)
def test_errors_of_the_system_have_a_status(number: int, status: Status) -> None:
    assert write_status(OSError(number, "x")) is status


def test_reading_past_the_end_of_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    store = Store.open_file(path, SIZE, None, entropy)
    os.truncate(path, 4096)
    with pytest.raises(OSError, match="shorter"):
        store.read(4096, memoryview(bytearray(4096)))
    store.close()


def test_buffers_are_reused_and_bounded_in_total_and_for_each_connection() -> None:
    pool = BufferPool(limit_bytes=64 << 10)
    first, second = ConnectionBuffers(pool, 32 << 10), ConnectionBuffers(pool, 64 << 10)
    buffer = first.allocate(20_000)
    assert buffer is not None
    assert len(buffer) == 20_000
    memory = buffer.obj
    assert first.allocate(1) is None
    other = second.allocate(32 << 10)
    assert other is not None
    assert second.allocate(1) is None
    first.release(buffer)
    again = first.allocate(32 << 10)
    assert again is not None
    assert again.obj is memory
    assert pool.used_bytes == 64 << 10
    first.release(again)
    second.release(other)
    assert pool.used_bytes == first.used_bytes == second.used_bytes == 0
