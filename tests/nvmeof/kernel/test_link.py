"""Connections by nvme-cli, whatever it says: what is there afterwards counts, and only what we made is undone."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

import pytest

from tests.ports import held_port
from xkv_nvmeof.initiator_errors import ConnectFailed, ConnectUnanswered, NamespaceUnusable
from xkv_nvmeof.initiator_options import InitiatorOptions, TargetAddress
from xkv_nvmeof.kernel import link as link_module
from xkv_nvmeof.kernel import ways
from xkv_nvmeof.kernel.link import Cause, FabricLink, NoNamespace, NotConnected, judge
from xkv_nvmeof.kernel.sysfs import read_view
from xkv_nvmeof.kernel.tool import NvmeTool, ToolMissing, ToolStuck
from xkv_nvmeof.kernel.view import Namespace, Peer, Wanted
from xkv_nvmeof.kernel.ways import FabricWay

from .fake_sysfs import HOST_ID, HOST_NQN, NQN, FakeSysfs

if TYPE_CHECKING:
    from pathlib import Path

PEER = Peer(NQN, "127.0.0.1", 4420, HOST_NQN, HOST_ID)
WANTED = Wanted(NQN, 1, b"\x11" * 16, b"\x22" * 16)
OTHER = "nqn.2026-01.org.example:other"


class Bench:
    """A link, a sysfs, and an nvme-cli that changes it: `on_connect` says how, and with which exit code."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeSysfs(folder / "sys")
        self.calls = folder / "calls"
        self.program = folder / "nvme"
        self.whole = True
        self.asked = 0
        self.on_connect("exit 0")
        self.tool = NvmeTool(str(self.program))

    def on_connect(self, script: str) -> None:
        """A script for a shell, in which `appear` makes the connection and `vanish` ends it."""
        # A shell: it starts at once, however slow the machine is.
        self.program.write_text(f"""#!/bin/sh
parked={self.fake.root}/parked place={self.fake.root}/class/nvme-subsystem/nvme-subsys0
echo "$@" >> {self.calls}
appear() {{ mv $parked $place; }}
vanish() {{ mv $place $parked; }}
if [ $1 = disconnect ]; then vanish; exit 0; fi
{script}
""")
        self.program.chmod(0o755)

    def park(self) -> None:
        """Take the subsystem away, for nvme-cli to bring it back."""
        (self.fake.root / "class/nvme-subsystem/nvme-subsys0").rename(self.fake.root / "parked")

    def said(self) -> list[str]:
        return (
            [line.split()[0] for line in self.calls.read_text().splitlines()] if self.calls.exists() else []
        )

    def is_whole(self, _namespace: Namespace) -> bool:
        self.asked += 1
        return self.whole

    def link(self, connect_timeout_ms: int = 30_000) -> FabricLink:
        options = InitiatorOptions(HOST_NQN, HOST_ID, connect_timeout_ms=connect_timeout_ms)
        return FabricLink(options, self.tool, view=lambda: read_view(self.fake.root), is_whole=self.is_whole)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.fake.subsystem()
    bench.fake.controller()
    bench.fake.namespace()
    return bench


async def up(link: FabricLink, wanted: Wanted = WANTED) -> tuple[str, Namespace]:
    return await link.up("127.0.0.1", 4420, wanted)


async def test_a_connection_is_made_used_and_undone(bench: Bench) -> None:
    bench.park()
    bench.on_connect("""appear; echo '{"device":"nvme0"}'""")
    link = bench.link()
    controller, namespace = await up(link)
    assert (controller, namespace.node, link.ours) == ("nvme0", "nvme0n1", True)
    await link.down()
    assert bench.said() == ["connect", "disconnect"]
    assert read_view(bench.fake.root) == ()
    await link.down()
    assert bench.said() == ["connect", "disconnect"]


async def test_one_that_is_there_is_used_and_left(bench: Bench) -> None:
    link = bench.link()
    await up(link)
    assert not link.ours
    await link.down()
    assert bench.said() == []


@pytest.mark.parametrize("code", [0, 1, 22, 114])
async def test_a_path_that_is_there_counts_whatever_the_exit_code(bench: Bench, code: int) -> None:
    bench.park()
    bench.on_connect(f"appear; echo already connected >&2; exit {code}")
    link = bench.link()
    await up(link)
    assert link.ours


@pytest.mark.parametrize("code", [0, 1, 13, 22, 114])
async def test_nothing_connected_is_a_failure_whatever_the_exit_code(bench: Bench, code: int) -> None:
    bench.park()
    bench.on_connect(f"echo because >&2; exit {code}")
    with pytest.raises(NotConnected, match=f"because .exit code {code}."):
        await up(bench.link())


async def test_nvme_cli_killed_or_missing_is_told_apart(bench: Bench) -> None:
    bench.park()
    bench.on_connect("kill -9 $$")
    with pytest.raises(NotConnected, match="signal 9"):
        await up(bench.link())
    bench.program.unlink()
    with pytest.raises(ToolMissing):
        await up(bench.link())


async def test_already_connected_by_another_host_is_no_connection(bench: Bench) -> None:
    bench.fake.controller(host_nqn=OTHER, host_id=b"\x09" * 16)
    bench.on_connect("echo already connected >&2; exit 1")
    with pytest.raises(NotConnected):
        await up(bench.link())
    assert bench.said() == ["connect"]


async def test_a_path_that_is_connecting_is_waited_for_and_never_connected_twice(bench: Bench) -> None:
    bench.fake.controller(state="connecting")
    link = bench.link(connect_timeout_ms=300)
    with pytest.raises(ConnectUnanswered, match="nvme0 is connecting"):
        await up(link)
    link = bench.link()
    waiting = asyncio.create_task(up(link))
    await asyncio.sleep(0)
    bench.fake.controller(state="live")
    assert (await waiting)[0] == "nvme0"
    assert bench.said() == []


@pytest.mark.parametrize("lacks", ["size", "node", "namespace"])
async def test_the_namespace_is_waited_for_until_it_is_whole(bench: Bench, lacks: str) -> None:
    match lacks:
        case "size":
            bench.fake.write("block/nvme0n1/size", 0)
        case "node":
            bench.whole = False
        case "namespace":
            bench.fake.remove("block/nvme0n1")
    waiting = asyncio.create_task(up(bench.link(connect_timeout_ms=30_000)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    bench.whole = True
    bench.fake.namespace()
    assert (await waiting)[1].node == "nvme0n1"


async def test_what_never_becomes_whole_is_an_error_and_the_connection_is_undone(bench: Bench) -> None:
    bench.park()
    bench.on_connect("appear")
    bench.whole = False
    with pytest.raises(NoNamespace, match="namespace 1"):
        await up(bench.link(connect_timeout_ms=2_000))
    assert bench.said() == ["connect", "disconnect"]
    assert read_view(bench.fake.root) == ()


async def test_another_namespace_under_the_same_number_is_named(bench: Bench) -> None:
    bench.fake.namespace(nguid=b"\x44" * 16)
    with pytest.raises(NoNamespace, match="another one: NGUID 4444"):
        await up(bench.link(connect_timeout_ms=300))


async def test_nvme_cli_that_hangs_is_given_up_but_what_linux_made_meanwhile_is_ours(bench: Bench) -> None:
    bench.park()
    bench.on_connect("sleep 600")
    with pytest.raises(ToolStuck):
        await up(bench.link(connect_timeout_ms=500))
    bench.on_connect("appear; sleep 600")
    link = bench.link(connect_timeout_ms=2_000)
    await up(link)
    assert link.ours


async def test_a_controller_that_took_the_name_over_is_not_disconnected(bench: Bench) -> None:
    bench.park()
    bench.on_connect("appear")
    link = bench.link()
    await up(link)
    bench.fake.controller(host_nqn=OTHER, host_id=b"\x09" * 16)
    await link.down()
    assert bench.said() == ["connect"]


@pytest.mark.parametrize("allowed", [False, True])
async def test_who_may_not_connect_only_looks_whether_somebody_else_has(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, allowed: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(link_module, "FABRICS", tmp_path / "nvme-fabrics")
    if allowed:
        (tmp_path / "nvme-fabrics").touch()
    bench.park()
    link = bench.link()
    for _ in range(3):
        with pytest.raises(NotConnected) as caught:
            await up(link)
        assert caught.value.cause is Cause.NOT_ROOT
    assert bench.said() == ["connect"] * 3 * allowed
    (bench.fake.root / "parked").rename(bench.fake.root / "class/nvme-subsystem/nvme-subsys0")
    assert (await up(link))[0] == "nvme0"
    assert not link.ours


def test_the_cause_is_made_of_facts() -> None:
    facts = {"root": True, "fabrics": True, "tcp": True}
    assert judge((), PEER, **facts) is Cause.REFUSED
    assert judge((), PEER, **facts | {"root": False}) is Cause.NOT_ROOT
    assert judge((), PEER, **facts | {"fabrics": False}) is Cause.NO_FABRICS
    assert judge((), PEER, **facts | {"tcp": False}) is Cause.NO_TCP


@pytest.mark.parametrize(
    ("host_id", "cause"), [(HOST_ID, Cause.HALF_IDENTITY), (b"\x09" * 16, Cause.STRANGER)]
)
def test_another_host_and_half_an_identity_are_told_apart(bench: Bench, host_id: bytes, cause: Cause) -> None:
    bench.fake.controller(host_nqn=OTHER, host_id=host_id)
    view = read_view(bench.fake.root)
    assert judge(view, PEER, root=True, fabrics=True, tcp=True) is cause
    assert issubclass(NotConnected, ConnectFailed)


@pytest.mark.parametrize("listens", [True, False])
async def test_only_where_nobody_listens_a_refusal_may_be_another_thing_in_a_moment(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """Linux has one error for a target that is not there and for one that does not take this host."""
    for name in ("FABRICS", "NVME_TCP"):
        monkeypatch.setattr(link_module, name, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    bench.on_connect("echo Input/output error >&2; exit 1")
    with held_port() as port, socket.socket() as server:
        if listens:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
        address = TargetAddress("127.0.0.1", port, NQN)
        way = FabricWay(address, InitiatorOptions(HOST_NQN, HOST_ID), bench.tool, WANTED, read_only=False)
        with pytest.raises(NotConnected if listens else ConnectUnanswered, match="Input/output error"):
            await way.open(None)


@pytest.mark.parametrize("refusals", [3, 1 << 30])
async def test_a_node_that_is_not_ours_yet_is_tried_again_until_the_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    tried = [0]

    def open_node(path: Path, node: str | None, *, read_only: bool) -> object:
        tried[0] += 1
        if tried[0] <= refusals:
            try:
                raise PermissionError(13, "Permission denied")
            except OSError as error:
                raise NamespaceUnusable(f"{path}: this user may not open it") from error
        return (path, node, read_only)

    monkeypatch.setattr(ways, "_open", open_node)
    address = TargetAddress("127.0.0.1", 4420, NQN)
    options = InitiatorOptions(HOST_NQN, HOST_ID, connect_timeout_ms=60_000 if refusals == 3 else 100)
    way = FabricWay(address, options, bench.tool, WANTED, read_only=False)
    if refusals == 3:
        assert await way._open_soon("nvme0n1") == (ways.DEV / "nvme0n1", "nvme0n1", False)
    else:
        with pytest.raises(NamespaceUnusable, match="may not open"):
            await way._open_soon("nvme0n1")
