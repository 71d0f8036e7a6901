"""What the doctor says about a host, and that every finding that is not in order says what to do."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.gateway import alive, run
from tests.target.fake_spdk import fake_spdk
from tests.target.model_spdk import ModelVolumes
from tests.target.settings import AIO
from xkv_gateway.cli import doctor as command
from xkv_gateway.config import Config
from xkv_gateway.doctor import facts
from xkv_gateway.doctor.checks import Finding, Level, examine
from xkv_gateway.doctor.facts import Facts, FileFact, Interface, Questions, Reach, gather, read_interfaces
from xkv_gateway.errors import ExitCode
from xkv_gateway.networks import StorageNetworks

if TYPE_CHECKING:
    from pathlib import Path

HEALTHY = Facts(
    kernel="6.1.0",
    uid=0,
    admin=True,
    open_files_max=65536,
    memory_bytes=64 << 30,
    memory_available_bytes=32 << 30,
    huge_pages=(1024, 512, 2 << 20),
    clocksource="tsc",
    wall_s=1.8e9,
    clock_synchronised=True,
    modules={"nvme_core": "loaded", "nvme_fabrics": "loaded", "nvme_tcp": "loaded"},
    fabrics_device=True,
    nvme_cli="nvme version 2.3 (git 2.3)",
    interfaces=(Interface("eth1", 9000, up=True, addresses=("10.20.0.7", "fe80::1")),),
    receive_buffer_max=16 << 20,
    reaches=(Reach("10.20.0.5", 4420, ("10.20.0.5",), "10.20.0.7", 0.2),),
    files=(FileFact("fabric.dhchap_key_file", "/k", exists=True, mode=0o600, owner=0),),
    pci_driver="vfio-pci",
    state_dir_free_bytes=100 << 30,
)
STORAGE = StorageNetworks(["10.20.0.0/24"])
KERNEL = {"card": {"url": "kernel+tcp://10.20.0.5/nqn.2014-08.com.example:card0"}}
TARGET = {"target": {"rpc": "/s", "bdev": {"kind": "nvme", "pci": "0000:5e:00.0"}}}


def bad(facts: Facts, settings: dict[str, Any] | None = None) -> list[Finding]:
    findings = examine(facts, Config.model_validate(settings or {}), STORAGE)
    assert findings
    return [finding for finding in findings if finding.level is not Level.OK]


@pytest.mark.parametrize("settings", [{}, KERNEL, TARGET])
def test_a_healthy_host_is_in_order(settings: dict[str, Any]) -> None:
    assert bad(HEALTHY, settings) == []


@pytest.mark.parametrize(
    ("change", "settings", "check", "level"),
    [
        ({"open_files_max": 256}, {}, "open files", Level.PROBLEM),
        ({"open_files_max": 1024}, {}, "open files", Level.NOTE),
        ({"wall_s": 0.0}, {}, "clock", Level.PROBLEM),
        ({"clock_synchronised": False}, {}, "clock", Level.NOTE),
        ({"clocksource": "hpet"}, {}, "clock source", Level.NOTE),
        ({"memory_available_bytes": 100 << 20}, {}, "memory", Level.PROBLEM),
        ({"memory_available_bytes": 1 << 30}, {}, "memory", Level.NOTE),
        ({"memory_available_bytes": None}, {}, "memory", Level.NOTE),
        ({"state_dir_problem": "/var cannot be written to"}, {}, "state directory", Level.PROBLEM),
        ({"state_dir_free_bytes": 1 << 20}, {}, "state directory", Level.NOTE),
        (
            {"modules": {"nvme_fabrics": "loaded", "nvme_tcp": "absent"}},
            KERNEL,
            "module nvme-tcp",
            Level.PROBLEM,
        ),
        ({"modules": {"nvme_tcp": "loaded"}}, KERNEL, "module nvme-fabrics", Level.NOTE),
        ({"nvme_cli": ""}, KERNEL, "nvme-cli", Level.PROBLEM),
        ({"nvme_cli": "nvme version 1.16"}, KERNEL, "nvme-cli", Level.PROBLEM),
        ({"nvme_cli": None}, {}, "nvme-cli", Level.NOTE),
        ({"admin": False}, KERNEL, "permissions", Level.PROBLEM),
        ({"receive_buffer_max": 1 << 20}, {}, "TCP buffers", Level.NOTE),
        ({"interfaces": None}, {}, "storage network", Level.NOTE),
        ({"interfaces": ()}, {}, "storage network", Level.PROBLEM),
        (
            {"interfaces": (Interface("e", 1500, up=True, addresses=("10.20.0.7",)),)},
            {},
            "interface e",
            Level.NOTE,
        ),
        (
            {"interfaces": (Interface("e", 9000, up=False, addresses=("10.20.0.7",)),)},
            {},
            "interface e",
            Level.PROBLEM,
        ),
        ({"reaches": (Reach("t", 1, problem="no such name"),)}, {}, "target t:1", Level.PROBLEM),
        ({"reaches": (Reach("t", 1, ("10.30.0.1",), None, 0.1),)}, {}, "target t:1", Level.PROBLEM),
        ({"reaches": (Reach("t", 1, ("10.20.0.5",), "192.0.2.1", 0.1),)}, {}, "target t:1", Level.NOTE),
        ({"reaches": (Reach("t", 1, ("10.20.0.5",), None, 40.0),)}, {}, "target t:1", Level.NOTE),
        ({"reaches": (Reach("t", 1, ("10.20.0.5",), problem="refused"),)}, {}, "target t:1", Level.PROBLEM),
        ({"files": (FileFact("f", "/k", exists=False),)}, {}, "f", Level.PROBLEM),
        ({"files": (FileFact("f", "/k", exists=False, answers=False),)}, {}, "f", Level.PROBLEM),
        ({"files": (FileFact("target.hosts k", "/k", exists=False),)}, {}, "target.hosts k", Level.NOTE),
        ({"files": (FileFact("f", "/k", exists=True, mode=0o600, owner=7),)}, {}, "f", Level.NOTE),
        ({"files": (FileFact("f", "/k", exists=True, mode=0o644),)}, {}, "f", Level.PROBLEM),
        ({"huge_pages": (0, 0, 2 << 20)}, TARGET, "huge pages", Level.NOTE),
        ({"pci_driver": "nvme"}, TARGET, "SSD 0000:5e:00.0", Level.PROBLEM),
        ({"pci_driver": None}, TARGET, "SSD 0000:5e:00.0", Level.PROBLEM),
    ],
)
def test_each_thing_that_is_wrong_is_found_and_says_what_to_do(
    change: dict[str, Any], settings: dict[str, Any], check: str, level: Level
) -> None:
    [finding] = bad(replace(HEALTHY, **change), settings)
    assert (finding.check, finding.level) == (check, level)
    assert finding.text
    assert finding.advice or finding.check == "memory"


@pytest.mark.parametrize("networks", [[], ["127.0.5.0/24", "::1/128"]])
def test_a_storage_network_on_loopback_needs_no_interface(networks: list[str]) -> None:
    reach = Reach("127.0.5.1", 1, ("127.0.5.1",), "127.0.0.1", 0.1)
    found = examine(replace(HEALTHY, reaches=(reach,)), Config(), StorageNetworks(networks))
    assert [finding for finding in found if finding.level is not Level.OK] == []


def test_what_only_the_kernels_initiator_needs_is_no_problem_without_it() -> None:
    facts = replace(
        HEALTHY, modules={"nvme_tcp": "absent", "nvme_fabrics": "available"}, nvme_cli="", admin=False
    )
    assert bad(facts) == []


async def test_the_facts_are_read_from_the_system(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 512 kB\nHugePages_Total: 3\nHugePages_Free: 1\nHugepagesize: 2048 kB\n",
        "proc/self/status": "Name: x\nCapEff:\t0000000000200000\n",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        f"lib/modules/{os.uname().release}/modules.dep": "kernel/drivers/nvme/host/nvme-tcp.ko.xz: x\n",
        "sys/module/nvme_core/x": "",
        "sys/bus/pci/devices/0000:5e:00.0/x": "",
        "run/systemd/timesync/synchronized": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    key = tmp_path / "key"
    key.touch(0o600)
    questions = Questions(
        (("127.0.0.1", port), ("no-such-host.invalid", 1)),
        (("k", str(key)), ("m", str(tmp_path / "missing"))),
        "0000:5e:00.0",
        tmp_path / "a" / "b",
    )
    facts = await gather(questions, root=tmp_path, wall_s=time.time())
    listener.close()
    assert (facts.memory_bytes, facts.memory_available_bytes) == (1 << 20, 1 << 19)
    assert facts.huge_pages == (3, 1, 2 << 20)
    assert (facts.admin, facts.clocksource, facts.clock_synchronised) == (True, "tsc", True)
    assert facts.modules == {"nvme_core": "loaded", "nvme_fabrics": "absent", "nvme_tcp": "available"}
    assert facts.receive_buffer_max == 6_291_456
    near, nowhere = facts.reaches
    assert near.connected_ms is not None
    assert near.source == "127.0.0.1"
    assert nowhere.problem == "its name cannot be resolved"
    assert [fact.exists for fact in facts.files] == [True, False]
    assert facts.pci_driver == ""
    assert facts.state_dir_free_bytes
    bare = await gather(Questions(), root=tmp_path / "nothing", wall_s=0.0)
    assert (bare.memory_bytes, bare.admin, bare.huge_pages, dict(bare.modules)) == (None, None, None, {})


@pytest.mark.parametrize("value", [None, {}, "x", 7])
def test_interfaces_of_another_shape_are_not_none_at_all(value: Any) -> None:
    assert read_interfaces(value) is None
    assert read_interfaces([value, {"ifname": "e", "addr_info": [value], "flags": value}]) == (
        Interface("e", None, up=False, addresses=()),
    )


async def test_the_command_judges_ports_and_the_target_and_its_exit_code_tells(tmp_path: Path) -> None:
    model = ModelVolumes()
    async with fake_spdk(tmp_path / "s", model.handle) as fake:
        file = tmp_path / "g.toml"
        file.write_text(
            f"[fabric]\nnetworks = ['127.0.5.0/24']\n[control]\nbind_address = '127.0.5.1'\n[target]\nrpc = '{fake.path}'\n"
            "nqn = 'nqn.2014-08.com.example:card0'\nlisteners = ['127.0.5.1:1']\nallow_any_host = true\n"
            "[target.bdev]\nkind = 'aio'\nfile = '/srv/card.img'\n"
        )
        finished = await run(tmp_path, "doctor", "--config", str(file), "--json")
    assert finished.code == ExitCode.DEGRADED
    document = json.loads(finished.out)
    assert document["healthy"] is False
    findings = {entry["check"]: entry for entry in document["findings"]}
    assert "inside the storage network" in findings["ports"]["text"]
    assert "steps are missing" in findings["target"]["text"]
    assert findings["target"]["level"] == "note"
    # `serve` makes the target before it connects.
    assert findings["target 127.0.5.1:1"]["level"] == "note"
    assert "nobody listens there yet" in findings["target 127.0.5.1:1"]["text"]
    plain = await run(tmp_path, "doctor")
    assert (plain.code == ExitCode.OK) is ("0 problems" in plain.out)


@pytest.mark.parametrize("state", ["away", "refused", "store missing", "hangs"])
async def test_where_serve_would_not_make_the_target_nobody_who_listens_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    model = ModelVolumes()
    settings: dict[str, Any] = {
        "nqn": "nqn.2014-08.com.example:card0",
        "listeners": ("127.0.5.1:1",),
        "allow_any_host": True,
        "bdev": AIO,
    }
    async with fake_spdk(tmp_path / "s", model.handle) as fake:
        match state:
            case "away":
                await fake.stop()
            case "refused":
                model.add_bdev("xkv-bdev0", "Malloc disk", 64 << 20, 4096)
            case "store missing":
                model.add_bdev("theirs", "Malloc disk", 256 << 20, 4096)
                settings["bdev"] = {"kind": "existing", "name": "theirs"}
                settings["lvol"] = {"name": "xkv-card", "size": 64 << 20}
            case _:
                monkeypatch.setattr(command, "TARGET_TIMEOUT_S", 0.1)
                fake.script = silent
        config = Config.model_validate({"target": {"rpc": str(fake.path), **settings}})
        found, coming = await command._target(config, StorageNetworks(["127.0.5.0/24"]), None)
    [finding] = found
    assert (finding.level, coming) == (Level.PROBLEM, frozenset()), finding
    assert finding.advice


async def silent(_request: dict[str, Any], _writer: asyncio.StreamWriter) -> bool:
    return True


async def test_a_file_system_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, stat = threading.Event(), os.stat
    silent_place, key = tmp_path / "away", tmp_path / "key"
    key.touch(0o600)

    def hanging(which: Any, **how: Any) -> os.stat_result:
        if str(which).startswith(str(silent_place)):
            assert released.wait(60)
        return stat(which, **how)

    monkeypatch.setattr(os, "stat", hanging)
    monkeypatch.setattr(facts, "FILES_TIMEOUT_S", 0.1)
    questions = Questions(files=(("k", str(key)), ("m", str(silent_place / "m"))), state_dir=silent_place)
    found = await gather(questions, root=tmp_path, wall_s=time.time())
    released.set()
    assert [fact.answers for fact in found.files] == [True, False]
    assert "does not answer" in found.state_dir_problem
    named = replace(HEALTHY, files=found.files, state_dir_problem=found.state_dir_problem)
    problems = {finding.check for finding in bad(named) if finding.level is Level.PROBLEM}
    assert problems == {"m", "state directory"}


async def test_a_tool_that_cannot_be_run_did_not_tell(tmp_path: Path) -> None:
    path = tmp_path / "tool"
    path.write_bytes(b"\0 no program")
    path.chmod(0o755)
    assert await facts._tool(str(path)) is None


async def test_what_a_tool_says_is_read_to_its_end(tmp_path: Path) -> None:
    tool = script(tmp_path, "head -c 300000 /dev/zero | tr '\\0' x; sleep 0.05; echo end")
    said = await facts._tool(tool)
    assert said is not None
    assert (len(said), said[-4:]) == (300_003, "xend")


async def test_a_tool_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "TOOL_TIMEOUT_S", 0.2)
    tool = script(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    assert await facts._tool(tool) is None
    if (tmp_path / "pid").exists():  # a machine that is very busy may not have come that far
        pid = int((tmp_path / "pid").read_text())
        async with asyncio.timeout(60):
            while alive(pid):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)


def script(folder: Path, text: str) -> str:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
