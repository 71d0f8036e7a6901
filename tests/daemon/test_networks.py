"""The storage network: targets inside, everybody else outside. Linux has all of 127.0.0.0/8, so one host is enough."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from tests.daemon.test_ports import opened, refused
from tests.rpc.harness import DictService, RawClient, serving
from tests.rpc.test_codec import packed
from tests.service.fake_card import fake_sources
from xkv_gateway.binds import BindAddress, bind_tcp
from xkv_gateway.cardurl import TcpCardUrl
from xkv_gateway.errors import BindRefusedError, CardUnavailableError, ExitCode, FabricRefusedError
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.service.admin import AdminServer, create_app, create_metrics_app
from xkv_gateway.target.attach import attach
from xkv_nvmeof.initiator_options import InitiatorOptions
from xkv_rpc.doors import Admits, Door, Doorkeeper, Knock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STORAGE: Final = StorageNetworks(["127.0.5.0/24", "fd00:20::/64"])
ANY: Final = BindAddress("0.0.0.0", "0.0.0.0", 0)


@pytest.mark.parametrize(
    ("ip", "inside"),
    [
        ("127.0.5.1", True),
        ("::ffff:127.0.5.1", True),
        ("127.0.6.1", False),
        ("127.0.0.1", False),
        ("fd00:20::7", True),
        ("fd00:20::7%eth0", True),
        ("fd00:21::7", False),
        ("::1", False),
    ],
)
def test_targets_may_be_inside_the_networks_and_nowhere_else(ip: str, inside: bool) -> None:
    assert STORAGE.holds(ip) is STORAGE.admits_target(ip) is inside


@pytest.mark.parametrize(("ip", "admitted"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False)])
def test_without_networks_targets_are_on_loopback_and_nobody_is_shut_out(ip: str, admitted: bool) -> None:
    assert StorageNetworks().admits_target(ip) is admitted
    assert not StorageNetworks().holds(ip)


@pytest.mark.parametrize(
    "settings",
    [
        {"control": {"bind_address": "127.0.5.1"}},
        {"control": {"bind_address": "::ffff:127.0.5.1"}},
        {"control": {"curve": {"bind_address": "127.0.5.1"}}},
        {"admin": {"bind_address": "127.0.5.1"}},
        {"admin": {"metrics": {"bind_address": "127.0.5.1"}}},
    ],
)
async def test_no_port_of_ours_opens_inside_the_storage_network(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    state_dir = tmp_path / "state"
    error = await refused(state_dir, {**settings, "fabric": {"networks": ["127.0.5.0/24"]}})
    assert isinstance(error, BindRefusedError)
    assert "inside the storage network" in str(error)
    assert not state_dir.exists()
    async with contextlib.AsyncExitStack() as undo:  # the same without the network is none of its business
        if "curve" not in settings.get("control", {}):
            await undo.enter_async_context(opened(state_dir, settings))


def test_nobody_from_the_storage_network_gets_through_a_door_but_the_unix_socket_stays() -> None:
    doorkeeper = Doorkeeper(barred=STORAGE.holds)
    for domain, mechanism in ((Admits.ANYONE, "NULL"), (Admits.LOOPBACK, "NULL"), (Admits.KEYS, "CURVE")):
        visit = doorkeeper.judge(Knock(domain, "127.0.5.9", mechanism, ""))
        assert (visit.admitted, visit.reason) == (False, "from the storage network")
    assert doorkeeper.judge(Knock(Admits.ANYONE, "127.0.6.9", "NULL", "")).admitted
    assert doorkeeper.judge(Knock(Admits.LOCAL, "localhost:0:0:1", "NULL", "")).admitted


def test_a_control_port_on_all_addresses_hears_nobody_from_the_storage_network() -> None:
    doorkeeper = Doorkeeper(barred=STORAGE.holds)
    door = Door("tcp://0.0.0.0:0", Admits.ANYONE)
    with serving(DictService(), endpoints=[door], doorkeeper=doorkeeper) as served:
        port = served.endpoints[0].rpartition(":")[2]
        with RawClient(f"tcp://127.0.5.9:0;127.0.0.1:{port}") as inside:
            inside.send(packed("ping", {}))
            deadline = time.monotonic() + 60
            while not doorkeeper.refused:
                assert time.monotonic() < deadline
                assert inside.receive_frames(0.01) is None
        with RawClient(f"tcp://127.0.0.9:0;127.0.0.1:{port}") as outside:
            assert "id" in outside.ask(packed("ping", {}))


@pytest.fixture(params=["admin", "metrics"])
def app(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "admin":
        yield create_app(fake_sources(), ANY, storage=STORAGE)
    else:
        yield create_metrics_app(fake_sources(), STORAGE)


async def test_an_admin_port_on_all_addresses_hears_nobody_from_or_on_the_storage_network(app: Any) -> None:
    listener = bind_tcp(ANY, section="admin")
    port = listener.getsockname()[1]
    server = AdminServer(app, listener)

    async def status(host: str, source: str) -> int:
        transport = httpx.AsyncHTTPTransport(local_address=source)
        async with httpx.AsyncClient(transport=transport, timeout=60) as client:
            return (await client.get(f"http://{host}:{port}/healthz")).status_code

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        await server.answers()
        assert await status("127.0.0.1", "127.0.0.9") == 200
        assert await status("127.0.0.1", "127.0.5.9") == 403
        assert await status("127.0.5.1", "127.0.0.9") == 403
        server.stop()


@pytest.mark.parametrize(
    ("host", "networks", "error", "words"),
    [
        ("192.0.2.1", [], FabricRefusedError, "no storage network is configured"),
        ("127.0.0.1", ["127.0.5.0/24"], FabricRefusedError, "outside of the storage networks"),
        ("localhost", ["127.0.5.0/24"], CardUnavailableError, "no address where a card may be"),
        ("127.0.5.1", ["127.0.5.0/24"], CardUnavailableError, "onnect"),
    ],
)
async def test_a_card_is_connected_to_inside_the_networks_only_by_the_address_that_its_name_stands_for(
    host: str, networks: list[str], error: type[Exception], words: str
) -> None:
    with contextlib.closing(bind_tcp(BindAddress("", "127.0.5.1", 0), section="admin")) as taken:
        port = taken.getsockname()[1]
    url = TcpCardUrl(host, port, "nqn.2014-08.com.example:card0", 1)
    options = InitiatorOptions("nqn.2014-08.com.example:host", bytes([1]) * 16)
    with pytest.raises(error, match=words):
        await attach(url, options, StorageNetworks(networks), clock=time.monotonic_ns, entropy=os.urandom)
    assert FabricRefusedError.exit_code is ExitCode.CONFIG
