"""The soft card as a process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.nvmeof.card_process import (
    DEADLINE_S,
    SocketHost,
    attach,
    refused_card,
    running_card,
)
from tests.ports import held_port
from xkv_nvmeof import builders
from xkv_nvmeof.blockdev import ByteRange, CommandFailed, DeviceError, DeviceState
from xkv_nvmeof.command import Sgl
from xkv_nvmeof.initiator_errors import ConnectRefused
from xkv_nvmeof.logpages import DiscoveryEntry, DiscoveryHeader
from xkv_nvmeof.pdu import PLAIN, FatalStatus, ICReq, encode, encode_command
from xkv_nvmeof.softcard.__main__ import main
from xkv_nvmeof.spec import DISCOVERY_NQN, LogPageId, Status

if TYPE_CHECKING:
    from xkv_nvmeof.initiator import TcpInitiator

SIZE = 64 << 20
MIB = 1 << 20


async def write(device: TcpInitiator, offset_bytes: int, data: bytes) -> None:
    await device.write_from(offset_bytes, [memoryview(data)])


async def read(device: TcpInitiator, offset_bytes: int, length_bytes: int) -> bytes:
    buffer = bytearray(length_bytes)
    await device.read_into(offset_bytes, [memoryview(buffer)])
    return bytes(buffer)


async def test_data_identity_and_counters_survive_a_restart_in_order(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    data = Random(1).randbytes(3 * MIB)
    with running_card("--file", path, "--size", "64MiB") as card:
        first = card.ready
        device = await attach(card)
        assert device.geometry.size_bytes == SIZE == first["size_bytes"]
        assert device.geometry.volatile_write_cache
        assert device.geometry.deallocate_zeroes
        assert device.identity.nguid.hex() == first["nguid"]
        await write(device, 4096, data)
        await write(device, 8 * MIB, data[:4096])
        await device.flush()
        assert await read(device, 4096, len(data)) == data
        counters = device.counters
        await device.aclose()
        code, log = card.stop()
        assert code == 0
        told = card.counters(log)
        assert told["write_bytes"] == counters.write_bytes == len(data) + 4096
        assert told["read_bytes"] == counters.read_bytes == len(data)
        assert told["flush_commands"] >= 1
        assert told["protocol_errors"] == 0
    assert path.stat().st_size == SIZE + 4096
    with running_card("--file", path) as card:
        places = {"port": 0, "portals": []}
        assert {**card.ready, **places} == {**first, **places}
        device = await attach(card, io_queues=4)
        assert await read(device, 4096, len(data)) == data
        await device.aclose()


@pytest.mark.parametrize("digests", ["off", "required"])
@pytest.mark.parametrize("block_bytes", [512, 4096])
async def test_a_card_in_memory_does_all_commands(digests: str, block_bytes: int) -> None:
    with running_card("--memory", "--size", "64MiB", "--block-bytes", str(block_bytes)) as card:
        device = await attach(card, header_digest=digests, data_digest=digests)
        assert device.geometry.block_bytes == block_bytes
        data = Random(2).randbytes(2 * MIB)
        for size in (block_bytes, 8192, 8192 + block_bytes, 2 * MIB):
            await write(device, SIZE - size, data[:size])
            assert await read(device, SIZE - size, size) == data[:size]
        await device.deallocate([ByteRange(SIZE - 2 * MIB, MIB)])
        await device.write_zeroes(ByteRange(SIZE - MIB, block_bytes))
        assert await read(device, SIZE - 2 * MIB, MIB + block_bytes) == bytes(MIB + block_bytes)
        assert (
            await read(device, SIZE - MIB + block_bytes, block_bytes)
            == data[MIB + block_bytes :][:block_bytes]
        )
        await device.aclose()


async def test_many_commands_at_once_on_several_queues_and_hosts_are_kept_apart(tmp_path: Path) -> None:
    with running_card("--file", tmp_path / "card.img", "--size", "64MiB") as card:
        devices = [await attach(card, io_queues=2, queue_depth=16) for _ in range(3)]

        async def work(number: int) -> None:
            random = Random(number)
            device = devices[number % 3]
            at = number * 4 * MIB
            for _ in range(4):
                data = random.randbytes(random.randrange(1, 256) * 4096)
                await write(device, at, data)
                assert await read(device, at, len(data)) == data
            await device.flush()

        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*map(work, range(15)))
        for device in devices:
            await device.aclose()


async def test_a_killed_card_is_offline_and_what_was_flushed_is_there_when_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    with contextlib.ExitStack() as undo:
        listen = ("--listen", f"127.0.0.1:{undo.enter_context(held_port())}")
        card = undo.enter_context(running_card("--file", path, "--size", "64MiB", *listen))
        device = await attach(card)
        await write(device, 0, b"a" * MIB)
        await device.flush()
        offline = asyncio.Event()
        device.add_state_listener(lambda state, _: offline.set() if state is DeviceState.OFFLINE else None)
        writes = [asyncio.ensure_future(write(device, n * MIB, b"b" * MIB)) for n in range(1, 9)]
        await asyncio.sleep(0)
        card.process.kill()
        async with asyncio.timeout(DEADLINE_S):
            await offline.wait()
            results = await asyncio.gather(*writes, return_exceptions=True)
        assert all(result is None or isinstance(result, DeviceError) for result in results)
        with pytest.raises(DeviceError):
            await read(device, 0, 4096)
        undo.enter_context(running_card("--file", path, *listen))
        async with asyncio.timeout(DEADLINE_S):
            while device.state is not DeviceState.ONLINE:  # noqa: ASYNC110 - the device reconnects by itself
                await asyncio.sleep(0)
        assert await read(device, 0, MIB) == b"a" * MIB
        await device.aclose()


async def test_no_room_on_the_disk_fails_the_command_and_not_the_card(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    with running_card("--file", path, "--size", "64MiB") as card:
        card.stop()
    with running_card("--file", path, file_limit_bytes=SIZE // 2) as card:
        device = await attach(card)
        with pytest.raises(CommandFailed) as caught:
            await write(device, SIZE // 2, bytes(MIB))
        assert (caught.value.status_code_type, caught.value.status_code) == (0, 0x81)
        assert caught.value.do_not_retry
        await write(device, 0, b"x" * MIB)
        await device.flush()
        assert await read(device, 0, MIB) == b"x" * MIB
        await device.aclose()
        code, log = card.stop()
        assert code == 0
        assert "CAPACITY_EXCEEDED" in log


def test_a_file_in_use_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    with running_card("--file", path, "--size", "64MiB") as card:
        assert "in use" in refused_card("--file", path)
        card.stop()
    assert "has 67108864 bytes, not 4096" in refused_card("--file", path, "--size", "4096")
    assert "blocks of 4096 bytes, not 512" in refused_card("--file", path, "--block-bytes", "512")
    damaged = bytearray(path.read_bytes()[-4096:])
    damaged[20] ^= 1
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(damaged)
    assert "damaged" in refused_card("--file", path)
    stranger = tmp_path / "letter.txt"
    stranger.write_text("Dear card" * 1000)
    assert "not a soft card" in refused_card("--file", stranger, "--size", "64MiB")
    assert stranger.read_text().startswith("Dear card")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--memory", "--size", "1GiB", "--listen", "0.0.0.0:0"), "--allow-remote"),
        (("--memory", "--size", "1GiB", "--listen", "localhost:0"), "numeric"),
        (("--memory", "--size", "1GiB", "--listen", "127.0.0.1"), "numeric"),
        (("--memory", "--size", "1GiB", "--listen", "127.0.0.1:70000"), "port"),
        (("--memory", "--size", "many"), "no size"),
        (("--memory", "--size", "4097"), "multiple"),
        (("--memory", "--size", "1GiB", "--block-bytes", "1024"), "512 or 4096"),
        (("--memory",), "size"),
        ((), "--file or --memory"),
        (("--memory", "--size", "1GiB", "--nqn", DISCOVERY_NQN), "qualified name"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_reason(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit)
    assert words in result.output


def test_a_new_file_needs_a_size_and_a_port_in_use_is_said(tmp_path: Path) -> None:
    new = tmp_path / "new.img"
    assert "does not exist, and a new card needs a size" in refused_card("--file", new)
    assert not new.exists()
    new.touch()
    assert "is empty, and a new card needs a size" in refused_card("--file", new)
    folder = refused_card("--file", tmp_path, "--size", "64MiB")
    assert folder == f"Error: {tmp_path}: Is a directory\n"
    with running_card("--memory", "--size", "1MiB") as card:
        port = card.ready["port"]
        assert "in use" in refused_card("--memory", "--size", "1MiB", "--listen", f"127.0.0.1:{port}")


def test_the_card_ends_when_its_stdin_does() -> None:
    with running_card("--memory", "--size", "1MiB", "--exit-with-stdin") as card:
        assert card.process.stdin is not None
        card.process.stdin.close()
        assert card.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_card_with_its_hosts_connected(number: signal.Signals) -> None:
    with running_card("--memory", "--size", "1MiB") as card, SocketHost(card) as host:
        host.init()
        assert host.connect(card.ready["nqn"]).ok
        code, log = card.stop(number)
        assert code == 0
        assert card.counters(log)["associations"] == 1
        assert host.last_words() is None


def test_counters_are_told_on_a_signal() -> None:
    with running_card("--memory", "--size", "1MiB") as card:
        card.process.send_signal(signal.SIGUSR1)
        assert card.process.stderr is not None
        seen = b""
        while b'"event": "counters"' not in seen:
            assert select.select([card.process.stderr], [], [], DEADLINE_S)[0]
            seen += os.read(card.process.stderr.fileno(), 65536)


@pytest.mark.parametrize("step_bytes", [0, 1])
def test_discovery_works_over_a_socket_whole_and_byte_by_byte(step_bytes: int) -> None:
    nqn = "nqn.2026-01.example:known"
    with (
        running_card("--memory", "--size", "1MiB", "--nqn", nqn) as card,
        SocketHost(card, step_bytes=step_bytes) as host,
    ):
        host.init()
        assert host.connect(DISCOVERY_NQN).ok
        host.command(builders.property_set(2, 0x14, 4, 0x460001))
        completion, log = host.command(builders.get_log_page(3, LogPageId.DISCOVERY, 3072))
        assert completion.ok
        assert DiscoveryHeader.from_bytes(log).record_count == 2
        entry = DiscoveryEntry.from_bytes(log[2048:])
        assert (entry.subnqn, entry.address, entry.service) == (nqn, "127.0.0.1", str(card.ready["port"]))


def test_the_reason_of_an_end_arrives_before_it() -> None:
    with running_card("--memory", "--size", "1MiB") as card:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 3000, b"\0" * 200_000, Random(1).randbytes(200_000)):
            with SocketHost(card) as host:
                host.send(garbage)
                term = host.last_words()
                assert term is not None
                assert term.fatal_status == FatalStatus.INVALID_HEADER_FIELD
        with SocketHost(card) as host:
            host.init()
            assert host.connect(card.ready["nqn"]).ok
            host.command(builders.property_set(2, 0x14, 4, 0x460001))
            with SocketHost(card) as queue:
                queue.init()
                assert queue.connect(card.ready["nqn"], 1, 1).ok
                entry = builders.write(1, 1, 0, 4, Sgl.in_capsule(16384))
                queue.send(encode_command(entry.to_bytes(), 16384, PLAIN) + bytes(16384))
                term = queue.last_words()
                assert term is not None
                assert term.fatal_status == FatalStatus.LIMIT_EXCEEDED
            assert host.last_words() is None


def test_the_association_ends_when_no_keep_alive_comes() -> None:
    with running_card("--memory", "--size", "1MiB") as card, SocketHost(card) as host:
        host.init()
        assert host.connect(card.ready["nqn"], kato_ms=1000).ok
        assert host.last_words() is None


def test_a_host_that_reads_nothing_is_let_go_when_its_association_ends() -> None:
    with running_card("--memory", "--size", "64MiB") as card, SocketHost(card) as admin:
        admin.init()
        cntlid = admin.connect(card.ready["nqn"], kato_ms=3000).dw0
        admin.command(builders.property_set(2, 0x14, 4, 0x460001))
        with SocketHost(card) as lazy:
            lazy.init()
            assert lazy.connect(card.ready["nqn"], 1, cntlid).ok
            for cid in range(30):
                entry = builders.read(cid, 1, 0, 256, Sgl.transport(MIB))
                lazy.send(encode_command(entry.to_bytes(), 0, PLAIN))
            assert admin.last_words() is None
            received = 0
            with suppress(ConnectionResetError):
                while chunk := lazy.socket.recv(MIB):
                    received += len(chunk)
            assert received < 30 * MIB


def test_a_card_that_was_stopped_for_long_hears_its_hosts_before_it_ends_them() -> None:
    with running_card("--memory", "--size", "1MiB") as card, SocketHost(card) as host:
        host.init()
        assert host.connect(card.ready["nqn"], kato_ms=2000).ok
        host.command(builders.property_set(2, 0x14, 4, 0x460001))
        card.process.send_signal(signal.SIGSTOP)
        time.sleep(2.2)  # nothing tells how long a stopped process has been stopped but the clock
        host.send(encode_command(builders.keep_alive(7).to_bytes(), 0, PLAIN))
        card.process.send_signal(signal.SIGCONT)
        assert host.receive() is not None
        completion, _ = host.command(builders.keep_alive(8))
        assert completion.ok


def test_connections_that_break_off_anywhere_leave_nothing_behind() -> None:
    with running_card("--memory", "--size", "1MiB") as card:
        descriptors = Path(f"/proc/{card.process.pid}/fd")

        def count_after_use() -> int:
            with SocketHost(card) as host:
                host.init()
                assert host.connect(card.ready["nqn"]).ok
                return len(list(descriptors.iterdir()))

        before = count_after_use()
        setup = encode(ICReq())
        for number in range(100):
            with SocketHost(card) as host:
                if number % 2:
                    host.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                host.send(setup[: number * 2])
        deadline = time.monotonic() + DEADLINE_S
        while count_after_use() > before + 2:
            assert time.monotonic() < deadline
        code, log = card.stop()
        assert code == 0
        assert "CRITICAL" not in log


async def test_only_named_hosts_may_connect() -> None:
    with running_card("--memory", "--size", "1MiB", "--allow-host", "nqn.2026-01.org.example:other") as card:
        with pytest.raises(ConnectRefused) as caught:
            await attach(card)
        assert caught.value.status == Status.CONNECT_INVALID_HOST


async def test_a_host_that_reads_nothing_holds_up_nobody_else(tmp_path: Path) -> None:
    with running_card("--file", tmp_path / "card.img", "--size", "64MiB") as card, SocketHost(card) as admin:
        admin.init()
        cntlid = admin.connect(card.ready["nqn"]).dw0
        admin.command(builders.property_set(2, 0x14, 4, 0x460001))
        with SocketHost(card) as lazy:
            lazy.init()
            assert lazy.connect(card.ready["nqn"], 1, cntlid).ok
            for cid in range(30):
                entry = builders.read(cid, 1, 0, 256, Sgl.transport(MIB))
                lazy.send(encode_command(entry.to_bytes(), 0, PLAIN))
            device = await attach(card)
            async with asyncio.timeout(DEADLINE_S):
                for at in range(8):
                    await write(device, at * MIB, b"z" * MIB)
                assert await read(device, 0, MIB) == b"z" * MIB
            await device.aclose()
            received = 0
            while received < 30:
                answer = lazy.receive()
                assert answer is not None
                received += len(answer[1]) // MIB
