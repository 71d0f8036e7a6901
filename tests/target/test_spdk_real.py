"""A real SPDK target under gateways: made, used, killed in mid-load, made anew. XKV_SPDK_TGT names the binary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.gateway import COMMAND, Gateway, environment, run, serve_arguments, serving
from tests.e2e.killing import Crowd
from tests.e2e.notify import Manager
from tests.target.model_spdk import METHODS
from tests.target.real import HANG_S, HOST_NQN, IP, NQN, Process, Setup, process
from xkv_gateway.errors import ExitCode
from xkv_rpc.errors import RpcError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from xkv_rpc.async_client import AsyncClient

pytestmark = [
    pytest.mark.spdk,
    pytest.mark.skipif("XKV_SPDK_TGT" not in os.environ, reason="XKV_SPDK_TGT names no nvmf_tgt binary"),
]

SIZE: Final = 384 << 20
KEYS: Final = [bytes([number]) * 32 for number in range(16)]
PAYLOADS: Final = [bytes([number]) * 300_000 for number in range(16)]


@pytest.fixture
async def target(home: Path) -> AsyncIterator[Process]:
    async with process(home) as target:
        yield target


def file_bdev(home: Path, kind: str = "aio", block: int = 4096) -> dict[str, Any]:
    path = home / "card.img"
    path.touch()
    os.truncate(path, SIZE)
    return {"kind": kind, "name": "xkv-bdev0", "file": str(path), "block_size": block}


def gateway_of(setup: Setup) -> AbstractAsyncContextManager[Gateway]:
    return serving(setup.home / "state", "--config", str(setup.file), "--card", setup.url, card=None)


def tell(**figures: Any) -> None:
    """Show figures where the tests run with -s."""
    print(*(f"{name}={value}" for name, value in figures.items()))  # noqa: T201


# --- the calls --------------------------------------------------------------------------------------------------


async def test_spdk_knows_every_method_that_we_call(target: Process) -> None:
    assert set(METHODS) - set(await target.client.call("rpc_get_methods")) == set()


@pytest.mark.parametrize("kind", ["malloc", "aio", "uring", "lvol"])
async def test_each_kind_is_made_shown_and_taken_away_and_spdk_takes_every_parameter(
    home: Path,
    kind: str,
    target: Process,
) -> None:
    bdev: dict[str, Any] = {"kind": "malloc", "name": "xkv-bdev0", "size": 64 << 20}
    if kind != "malloc":
        bdev = file_bdev(home, "aio" if kind == "lvol" else kind)
    settings: dict[str, Any] = {"bdev": bdev}
    if kind == "lvol":
        settings["lvol"] = {"name": "xkv-card", "size": 128 << 20, "cluster_size": 1 << 20}
    setup = Setup(home, settings)
    keyed = {"nqn": HOST_NQN, "dhchap_key_file": setup.key("a"), "dhchap_ctrl_key_file": setup.key("b")}
    settings["hosts"] = [keyed]
    assert "speak NVMe/TCP" in await setup.command("target", "plan", code=ExitCode.DEGRADED)
    await setup.command("target", "apply", "--format-store")
    assert "as it shall be" in await setup.command("target", "plan")
    settings["hosts"] = [{**keyed, "dhchap_key_file": setup.key("c")}]
    assert "other keys" in await setup.command("target", "apply")
    assert "as it shall be" in await setup.command("target", "status", "--interval", "0.1")
    assert "nothing was done" in await setup.command("target", "destroy", code=ExitCode.REFUSED)
    await setup.command("target", "destroy", "--yes", "--volumes")
    for method in ("bdev_get_bdevs", "keyring_get_keys", "bdev_lvol_get_lvstores"):
        assert await target.client.call(method) == []
    assert len(await target.client.call("nvmf_get_subsystems")) == 1


async def test_a_listener_with_tls_and_psk_is_known_again(home: Path, target: Process) -> None:
    psk = home / "psk"
    psk.write_text("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:")
    psk.chmod(0o600)
    hosts = [{"nqn": HOST_NQN, "psk_file": str(psk)}]
    setup = Setup(home, {"bdev": file_bdev(home), "tls": True, "hosts": hosts})
    assert "with TLS" in await setup.command("target", "apply")
    assert "as it shall be" in await setup.command("target", "plan")


async def test_a_target_that_waits_for_us_is_started(home: Path) -> None:
    async with process(home, None, "--wait-for-rpc"):
        startup = {
            "dhchap_digests": ("sha384",),
            "dhchap_dhgroups": ("ffdhe3072",),
            "tls_buffer_size": 2 << 20,
        }
        setup = Setup(home, {"bdev": file_bdev(home), "startup": startup})
        assert "let the target begin" in await setup.command("target", "plan", code=ExitCode.DEGRADED)
        await setup.command("target", "apply")
        said = await setup.command("target", "plan")
        assert "as it shall be" in said
        assert "note" not in said, "it has the digests and groups that it was told"


async def test_a_target_is_reached_through_whatever_forwards_its_socket(home: Path, target: Process) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(target.rpc)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, IP, 0) as server:
        port = server.sockets[0].getsockname()[1]
        setup = Setup(home, {"bdev": file_bdev(home)}, rpc=f"tcp://{IP}:{port}")
        await setup.command("target", "apply")
        assert "as it shall be" in await setup.command("target", "plan")


# --- a gateway on it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "block", "max_io", "digests"),
    [
        ("malloc", 4096, 1 << 20, "off"),
        ("malloc", 512, 128 << 10, "required"),
        ("aio", 4096, 128 << 10, "off"),
        ("aio", 512, 1 << 20, "required"),
        ("uring", 4096, 1 << 20, "preferred"),
        ("lvol", 4096, 1 << 20, "off"),
        ("lvol", 512, 128 << 10, "off"),
    ],
)
async def test_a_replay_through_each_kind_of_card_finds_every_byte(
    home: Path,
    target: Process,
    kind: str,
    block: int,
    max_io: int,
    digests: str,
) -> None:
    bdev: dict[str, Any] = {"kind": "malloc", "name": "xkv-bdev0", "size": SIZE, "block_size": block}
    if kind != "malloc":
        bdev = file_bdev(home, "aio" if kind == "lvol" else kind, block)
    settings: dict[str, Any] = {"bdev": bdev, "transport": {"max_io_size": max_io}}
    if kind == "lvol":
        settings["lvol"] = {"name": "xkv-card", "size": 320 << 20, "cluster_size": 1 << 20}
    setup = Setup(home, settings, nvme={"header_digest": digests, "data_digest": digests})
    await setup.make(format_store=True)
    async with gateway_of(setup) as gateway:
        connection = (await gateway.status())["card"]["connection"]
        assert connection["mdts_bytes"] == max_io
        assert connection["data_digest"] is (digests != "off")
        begin = time.monotonic()
        arguments = ("--port", str(gateway.control_port), "--limit", "60", "--json")
        finished = await run(home, "replay", *arguments)
        assert finished.code == ExitCode.OK, finished.err
        tell(
            kind=kind, block=block, max_io=max_io, digests=digests, seconds=f"{time.monotonic() - begin:.2f}"
        )
        assert await gateway.end() == ExitCode.OK


async def lookups_while_away(gateway: Gateway, client: AsyncClient, count: int) -> list[float]:
    """Return how long lookups take, in milliseconds, while the card is offline."""
    await gateway.until(lambda status: status["card"]["state"] == "offline")
    taken = []
    for _ in range(count):
        begin = time.monotonic()
        assert (await client.lookup("", b"", KEYS)).hits == 0
        taken.append((time.monotonic() - begin) * 1e3)
    return taken


async def served_again(client: AsyncClient, key: bytes) -> None:
    """Return once a store and a load went to the card."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await client.store("again", b"", [key], [PAYLOADS[0]])
                if (await client.load("again", b"", [key])).statuses == ["ok"]:
                    return
            except RpcError:
                pass
            await asyncio.sleep(0.01)


async def test_a_target_killed_in_mid_load_is_made_anew_and_every_acknowledged_store_is_there(
    home: Path,
    target: Process,
) -> None:
    setup = Setup(home, {"bdev": file_bdev(home)})
    await setup.make()
    crowd = Crowd(7, 3)
    back_s, from_listening_s, lookups = [], [], []
    async with gateway_of(setup) as gateway:
        client = gateway.client()
        for life in range(4):
            tasks = await crowd.busy_until(gateway, 60)
            target.kill()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            lookups += await lookups_while_away(gateway, client, 300)
            if life == 2:
                await asyncio.sleep(4)  # by now the pauses have grown
            up = await target.start()
            listens = asyncio.create_task(listening(setup.port))
            await served_again(client, b"life %d" % life)
            back_s.append(time.monotonic() - up)
            from_listening_s.append(time.monotonic() - await listens)
            await crowd.verify_keys(gateway)
        await client.aclose()
        assert not crowd.wrong
        await gateway.logged("was restarted")
        assert await gateway.end() == ExitCode.OK
    tell(
        back_s=[f"{value:.2f}" for value in back_s],
        from_listening_s=[f"{value:.2f}" for value in from_listening_s],
        lookup_ms_p50=f"{statistics.median(lookups):.2f}",
        lookup_ms_p99=f"{sorted(lookups)[len(lookups) * 99 // 100]:.2f}",
        lookup_ms_max=f"{max(lookups):.2f}",
        acknowledged=crowd.acknowledged,
    )
    # The bars (3 s, 5 ms) are for a machine that does nothing else.
    assert max(back_s) < 20


async def test_a_gateway_that_starts_before_its_target_makes_it_and_serves(
    home: Path,
    target: Process,
) -> None:
    setup = Setup(home, {"bdev": file_bdev(home)})
    await setup.make()
    target.kill()
    manager = Manager(home / "notify")
    arguments = (*serve_arguments(home / "state", None), "--config", str(setup.file), "--card", setup.url)
    gateway = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        env=environment(home, NOTIFY_SOCKET=str(manager.path)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await manager.until("STATUS=waiting for the card: ")
        await target.start()
        await manager.until("READY=1")
        gateway.terminate()
        async with asyncio.timeout(HANG_S):
            assert await gateway.wait() == ExitCode.OK
    finally:
        with contextlib.suppress(ProcessLookupError):
            gateway.kill()
        await gateway.wait()
        manager.close()


async def listening(port: int) -> float:
    """Return when the card's port accepts again, by the monotonic clock."""
    while True:
        try:
            _, writer = await asyncio.open_connection(IP, port)
        except OSError:
            await asyncio.sleep(0.005)
            continue
        writer.close()
        return time.monotonic()


async def test_a_target_that_is_emptied_under_us_is_made_anew_but_its_memory_is_no_card(
    home: Path,
    target: Process,
) -> None:
    setup = Setup(home, {"bdev": {"kind": "malloc", "name": "xkv-bdev0", "size": SIZE}})
    await setup.make()
    async with gateway_of(setup) as gateway:
        async with gateway.client() as client:
            await client.store("", b"", KEYS, PAYLOADS)
            target.kill()
            await target.start()
            async with asyncio.timeout(HANG_S):
                code = await gateway.process.wait()
        assert code == ExitCode.CARD_LOST
        assert gateway.pump is not None
        await gateway.pump
        await gateway.logged("its superblock is gone")


async def test_a_target_that_stands_still_holds_up_neither_lookups_nor_the_end(
    home: Path,
    target: Process,
) -> None:
    setup = Setup(home, {"bdev": file_bdev(home)}, nvme={"command_timeout_ms": 1500})
    await setup.make()
    async with gateway_of(setup) as gateway, gateway.client() as client:
        await client.store("", b"", KEYS, PAYLOADS)
        target.signal(signal.SIGSTOP)
        taken = []
        for _ in range(300):
            begin = time.monotonic()
            await client.lookup("", b"", KEYS)
            taken.append((time.monotonic() - begin) * 1e3)
            await asyncio.sleep(0.02)
        tell(
            stopped_lookup_ms_p50=f"{statistics.median(taken):.2f}", stopped_lookup_ms_max=f"{max(taken):.2f}"
        )
        await gateway.logged("SPDK target is away")
        begin = time.monotonic()
        await gateway.end()
        assert time.monotonic() - begin < 15
        target.signal(signal.SIGCONT)


async def test_a_volume_and_a_file_grow_under_a_gateway_that_goes_on(home: Path, target: Process) -> None:
    lvol = {"name": "xkv-card", "size": 256 << 20, "cluster_size": 1 << 20}
    setup = Setup(home, {"bdev": file_bdev(home), "lvol": lvol})
    await setup.make(format_store=True)
    async with gateway_of(setup) as gateway, gateway.client() as client:
        await client.store("", b"", KEYS, PAYLOADS)
        lvol["size"] = 320 << 20
        assert "grow the volume" in await setup.command("target", "apply")
        grown = await gateway.until(lambda status: status["card"]["size_bytes"] == 320 << 20)
        assert grown["card"]["state"] == "online"
        assert set((await client.load("", b"", KEYS)).statuses) == {"ok"}
        assert await gateway.end() == ExitCode.OK


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [False, True], ids=["one way", "both ways"])
async def test_the_right_keys_open_the_card_and_wrong_ones_do_not(
    home: Path,
    target: Process,
    *,
    mutual: bool,
) -> None:
    setup = Setup(home, {"bdev": file_bdev(home)})
    host = {"nqn": HOST_NQN, "dhchap_key_file": setup.key("host.key")}
    setup.fabric = {"dhchap_key_file": host["dhchap_key_file"]}
    if mutual:
        host["dhchap_ctrl_key_file"] = setup.key("target.key")
        setup.fabric["dhchap_ctrl_key_file"] = host["dhchap_ctrl_key_file"]
    setup.target["hosts"] = [host]
    await setup.make()
    async with gateway_of(setup) as gateway, gateway.client() as client:
        assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
        assert set((await client.load("", b"", KEYS)).statuses) == {"ok"}
        [controller] = await target.client.call("nvmf_subsystem_get_controllers", {"nqn": NQN})
        assert controller["hostnqn"] == HOST_NQN
        authenticated = (await gateway.status())["card"]["connection"]["authenticated"]
        assert authenticated["both_ways"] is mutual
        assert await gateway.end() == ExitCode.OK
    right = dict(setup.fabric)
    for wrong in right if mutual else ["dhchap_key_file"]:
        setup.fabric = {**right, wrong: setup.key("wrong.key")}
        said = await setup.command("card", "info", setup.url, code=ExitCode.CARD)
        tell(wrong=wrong, said=said.splitlines()[0][-160:])
    setup.fabric = {}
    await setup.command("card", "info", setup.url, code=ExitCode.CARD)
