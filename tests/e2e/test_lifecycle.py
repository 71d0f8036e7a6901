from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from typing import TYPE_CHECKING

import msgpack
import pytest
import zmq

from tests.e2e.gateway import (
    COMMAND,
    HANG_S,
    PATIENT,
    alive,
    environment,
    gone,
    run,
    serve_arguments,
    serving,
)
from xkv_gateway.errors import ExitCode
from xkv_rpc.async_client import AsyncClient
from xkv_rpc.errors import XkvRpcError

if TYPE_CHECKING:
    from pathlib import Path


async def test_the_start_message_says_what_is_served_and_what_to_type(home: Path) -> None:
    async with serving(home / "state") as gateway:
        assert gateway.said[0].startswith("xkv-gateway ")
        assert f"soft:{home}/state.img" in gateway.said_at("card")
        assert "256 MiB" in gateway.said_at("card")
        assert "cold" in gateway.said_at("card")
        line = next(line for line in gateway.said if " status" in line)
        assert line.endswith(f" status --admin {gateway.admin}")
        status = await run(home, "status", "--admin", gateway.admin)
        assert status.code == ExitCode.OK
        assert "online" in status.out
        assert stat.S_IMODE((home / "state").stat().st_mode) == 0o700


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_cleanly_and_leaves_no_process(home: Path, number: signal.Signals) -> None:
    async with serving(home / "state") as gateway:
        soft_card = (await gateway.status())["card"]["soft_card"]["pid"]
        assert alive(soft_card)
        assert await gateway.end(number) == ExitCode.OK
        assert not alive(soft_card)
        assert "Traceback" not in gateway.log_text


async def test_clients_that_hang_do_not_hold_up_the_end(home: Path) -> None:
    async with serving(home / "state") as gateway:
        host, _, port = gateway.admin.rpartition(":")
        _, half_sent = await asyncio.open_connection(host, int(port))
        half_sent.write(b"GET /v1/status HTTP/1.1\r\nHost: local")
        silent = socket.create_connection(("127.0.0.1", gateway.control_port))
        assert await gateway.end() == ExitCode.OK, "by itself, and not by force at the deadline of the stop"
        half_sent.close()
        silent.close()


async def test_unread_replies_and_stores_in_flight_do_not_hold_up_the_end(home: Path) -> None:
    async with serving(home / "state") as gateway:
        endpoint = f"tcp://127.0.0.1:{gateway.control_port}"
        client = AsyncClient(endpoint, PATIENT)
        payload = bytes(1 << 20)
        await client.store("", b"", [b"read"], [payload])
        context = zmq.Context()
        mute = [context.socket(zmq.DEALER) for _ in range(10)]
        for number, dealer in enumerate(mute):
            dealer.connect(endpoint)
            for index in range(20):
                load = {
                    "v": 1,
                    "id": number * 100 + index,
                    "op": "load",
                    "ns": "",
                    "scope": b"",
                    "keys": [b"read"],
                }
                dealer.send(msgpack.packb(load))
        stores = [asyncio.create_task(client.store("", b"", [b"%d" % i], [payload])) for i in range(20)]
        await gateway.until(lambda status: status["requests"].get("store", 0) > 1)
        assert await gateway.end() == ExitCode.OK, "by itself, and not by force at the deadline of the stop"
        outcomes = await asyncio.gather(*stores, return_exceptions=True)
        # Every store heard of its end: stored, refused, or that the gateway is gone.
        assert all(outcome == ["stored"] or isinstance(outcome, XkvRpcError) for outcome in outcomes), (
            outcomes,
            gateway.log_text,
        )
        await client.aclose()
        for dealer in mute:
            dealer.close(linger=0)
        context.term()


async def test_a_second_signal_forces_the_end_and_says_so(home: Path) -> None:
    async with serving(home / "state") as gateway:
        soft_card = (await gateway.status())["card"]["soft_card"]["pid"]
        # A stopped soft card does not answer the leave-taking, so that the orderly end takes its time.
        os.kill(soft_card, signal.SIGSTOP)
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.logged("SIGTERM: ending")
        code = await gateway.end(signal.SIGTERM)
        assert code == ExitCode.FORCED
        await gone(soft_card)


async def test_killing_the_gateway_leaves_no_process(home: Path) -> None:
    async with serving(home / "state") as gateway:
        soft_card = (await gateway.status())["card"]["soft_card"]["pid"]
        assert await gateway.end(signal.SIGKILL) == -signal.SIGKILL
        await gone(soft_card)
    async with serving(
        home / "state"
    ) as gateway:  # stale sockets and locks do not keep the next one from starting
        assert (await gateway.status())["card"]["state"] == "online"


async def test_a_second_start_on_the_same_ports_says_so_and_leaves_the_first_alone(home: Path) -> None:
    async with serving(home / "first") as gateway:
        for flag, port in (
            ("--port", gateway.control_port),
            ("--admin-port", gateway.admin.rpartition(":")[2]),
        ):
            second = await run(home, *serve_arguments(home / "second", "256MiB"), flag, str(port))
            assert second.code == ExitCode.ADDRESS_IN_USE
            assert f"127.0.0.1:{port}" in second.err
            assert "already in use" in second.err
            assert "Traceback" not in second.err
            assert not (home / "second.img").exists()
        assert (await gateway.status())["card"]["state"] == "online"
        client = gateway.client()
        await client.ping()
        await client.aclose()


async def test_two_gateways_never_share_a_state_directory(home: Path) -> None:
    async with serving(home / "state"):
        second = await run(home, *serve_arguments(home / "state", None))
        assert second.code in {ExitCode.STATE_DIR, ExitCode.ADDRESS_IN_USE}
        assert str(home / "state") in second.err


async def test_two_gateways_never_share_a_soft_card(home: Path) -> None:
    card = f"soft:{home}/card.img?size=256MiB"
    async with serving(home / "first", "--card", card, card=None) as gateway:
        second = await run(home, *serve_arguments(home / "second", None), "--card", card)
        assert second.code == ExitCode.CARD
        assert f"{home}/card.img" in second.err
        assert "Traceback" not in second.err
        assert (await gateway.status())["card"]["state"] == "online"


async def test_a_signal_during_the_start_ends_it_cleanly(home: Path) -> None:
    connected = asyncio.Event()

    async def accept_and_say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    target = await asyncio.start_server(accept_and_say_nothing, "127.0.0.1", 0)
    port = target.sockets[0].getsockname()[1]
    async with target:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *serve_arguments(home / "state", None),
            "--card",
            f"nvme+tcp://127.0.0.1:{port}/nqn.2014-08.com.example:silent",
            env=environment(home),
            stderr=asyncio.subprocess.PIPE,
        )
        talk = asyncio.create_task(process.communicate())
        met = asyncio.create_task(connected.wait())
        async with asyncio.timeout(HANG_S):
            await asyncio.wait((talk, met), return_when=asyncio.FIRST_COMPLETED)
            assert met.done(), talk.result()
            process.terminate()
            _, err = await talk
        assert process.returncode == ExitCode.OK
        assert b"Traceback" not in err
