"""A target whose answers are nonsense, or that was built without a part of it: an error that says so, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.gateway import run
from tests.target.fake_spdk import FakeSpdk, RpcFault, fake_spdk
from tests.target.model_spdk import ModelVolumes
from tests.target.real import Setup
from tests.target.settings import AIO, KEYED, wanted
from tests.target.test_plan import VARIANTS
from xkv_gateway.errors import ExitCode, TargetError
from xkv_gateway.logs import set_up_logging
from xkv_gateway.target import spdk
from xkv_rpc.addresses import SpdkAddress
from xkv_rpc.spdk import SpdkClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from xkv_gateway.target.desired import DesiredTarget

HANG_S: Final = 60.0
READING: Final = (
    "rpc_get_methods",
    "framework_get_reactors",
    "spdk_get_version",
    "framework_wait_init",
    "bdev_wait_for_examine",
    "framework_get_config",
    "nvmf_get_transports",
    "keyring_get_keys",
    "bdev_get_bdevs",
    "bdev_lvol_get_lvstores",
    "nvmf_get_subsystems",
)
NONSENSE: Final = (
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b'"\\ud800"',
    b"{}",
    b"[null, [], {}]",
    b"9" * 5_000,
    b"[" * 3_000 + b"]" * 3_000,
    b'[{"name": "\\ud800", "trtype": {}, "nqn": [], "path": 7}]',
    b'{"pid": 1e400, "version": ["x"]}',
    b'[{"nqn": "nqn.2014-08.com.example:card0", "hosts": 5, "serial_number": 7, "namespaces": [{"nsid": "x"}],'
    b' "listen_addresses": [{"trtype": "TCP", "traddr": "127.0.5.1", "trsvcid": "' + b"9" * 5_000 + b'"}]}]',
    b'[{"name": "xkv-bdev0", "block_size": -5, "num_blocks": 0, "aliases": {"a": 1}, "driver_specific": []}]',
)


@contextlib.asynccontextmanager
async def target(
    folder: Path, model: ModelVolumes, name: str = "s"
) -> AsyncIterator[tuple[FakeSpdk, SpdkClient, DesiredTarget]]:
    path = folder / name
    async with fake_spdk(path, model.handle) as fake, asyncio.timeout(HANG_S):
        client = SpdkClient(SpdkAddress(str(path)), clock=time.monotonic_ns, timeout_ms=30_000)
        yield fake, client, replace(wanted(), rpc=SpdkAddress(str(path)))
        client.close()


@pytest.mark.parametrize("method", READING)
async def test_whatever_it_answers_it_is_read_or_that_is_an_error_of_the_target(
    tmp_path: Path, method: str
) -> None:
    async with target(tmp_path, ModelVolumes()) as (fake, client, desired):
        await spdk.apply(client, desired)
        for answer in NONSENSE:

            async def script(
                request: dict[str, Any], writer: asyncio.StreamWriter, answer: bytes = answer
            ) -> bool:
                if request["method"] == method:
                    writer.write(b'{"jsonrpc":"2.0","id":%d,"result":%b}\n' % (request["id"], answer))
                return bool(request["method"] == method)

            fake.script = script
            for call in (spdk.look(client), spdk.pid_of(client)):
                with contextlib.suppress(TargetError):
                    await call
        fake.script = None
        assert await spdk.apply(client, desired) == ()


async def test_the_command_that_shows_a_target_tells_what_it_cannot_read(home: Path) -> None:
    setup = Setup(home, {"bdev": AIO})
    async with target(home, ModelVolumes(), "spdk.sock") as (fake, _client, _desired):
        await setup.command("target", "apply")

        async def script(request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            if request["method"] == "bdev_get_iostat":
                writer.write(b'{"jsonrpc":"2.0","id":%d,"result":null}\n' % request["id"])
            return bool(request["method"] == "bdev_get_iostat")

        fake.script = script
        said = await setup.command("target", "status", code=ExitCode.TARGET)
        assert "bdev_get_iostat" in said


class Restarting:
    """A target that is restarted right before one of its calls."""

    def __init__(self, at: int, *, same_pid: bool = False) -> None:
        self._same_pid = same_pid
        self.model = ModelVolumes()
        self.calls = 0
        self.half = False
        """Whether anybody could have reached a subsystem without its namespace."""
        self._at = at

    def handle(self, method: str, params: dict[str, Any]) -> Any:
        self.calls += 1
        if self.calls == self._at:
            pid, self.model = self.model.pid, self.model.restarted()
            if self._same_pid:  # as in a container
                self.model.pid = pid
        answer = self.model.handle(method, params)
        self.half |= any(one["listeners"] and not one["namespaces"] for one in self.model.subsystems.values())
        return answer


@pytest.mark.parametrize("same_pid", [False, True], ids=["another pid", "same pid"])
@pytest.mark.parametrize("variant", ["plain", "keys"])
async def test_a_target_that_restarts_at_any_call_is_made_all_the_same(
    tmp_path: Path, variant: str, same_pid: bool
) -> None:
    settings = VARIANTS["keys"] if variant == "keys" else {}
    at, calls, life = 0, 0, Restarting(0)
    while at <= calls:
        at, before = at + 1, life.model
        life = Restarting(at, same_pid=same_pid)
        async with target(tmp_path, life.model) as (fake, client, desired):
            fake.handle = life.handle
            wished = replace(wanted(**settings), rpc=desired.rpc)
            await spdk.apply(client, wished)
            calls = life.calls
            await spdk.apply(client, wished)
            assert await spdk.apply(client, wished) == ()
        after = life.model
        assert not life.half
        if at > 1:
            assert (after.subsystems, after.keys, after.bdevs) == (
                before.subsystems,
                before.keys,
                before.bdevs,
            )


class Without(ModelVolumes):
    """A target that was built without keys and volumes."""

    missing = ("keyring_", "bdev_lvol_")

    def handle(self, method: str, params: dict[str, Any]) -> Any:
        if method.startswith(self.missing):
            raise RpcFault(-32601, "Method not found")
        answer = super().handle(method, params)
        return (
            [name for name in answer if not name.startswith(self.missing)] if "methods" in method else answer
        )


async def test_a_target_without_keys_and_volumes_is_made_where_none_are_asked_for(tmp_path: Path) -> None:
    async with target(tmp_path, Without()) as (_fake, client, desired):
        assert await spdk.apply(client, desired)
        assert await spdk.apply(client, desired) == ()
        with pytest.raises(TargetError, match="keyring_file_add_key"):
            await spdk.apply(client, replace(wanted(hosts=[KEYED]), rpc=desired.rpc))


SPOKEN: Final = "evil\x1b[2J\x1b]0;owned\x07\u202e\nforged"


@pytest.mark.parametrize("where", ["hosts", "namespaces", "serial_number", "version", "bdev"])
async def test_what_a_target_calls_its_things_moves_no_cursor_and_begins_no_line(
    home: Path, where: str
) -> None:
    setup = Setup(home, {"bdev": AIO})
    async with target(home, ModelVolumes(), "spdk.sock") as (fake, _client, _desired):
        await setup.command("target", "apply")
        handle = fake.handle

        def spoken(method: str, params: dict[str, Any]) -> Any:
            answer = copy.deepcopy(handle(method, params))
            if where == "version" and method == "spdk_get_version":
                return {"version": SPOKEN}
            if where == "bdev" and method == "bdev_get_bdevs":
                answer[0]["product_name"] = SPOKEN
            for one in answer if method == "nvmf_get_subsystems" else ():
                match where:
                    case "hosts":
                        one["hosts"] = [{"nqn": SPOKEN}]
                    case "namespaces":
                        one.setdefault("namespaces", []).append(
                            {"nsid": 9, "bdev_name": SPOKEN, "name": SPOKEN}
                        )
                    case "serial_number":
                        one["serial_number"] = SPOKEN
            return answer

        fake.handle = spoken
        said = ""
        for words in (
            ("target", "plan"),
            ("target", "apply"),
            ("target", "status", "--interval", "0.05"),
            ("doctor",),
        ):
            done = await run(home, *words, "--config", str(setup.file))
            said += done.out + done.err
        assert "evil" in said
        assert [sign for sign in ("\x1b", "\x07", "\u202e", "\nforged") if sign in said] == [], ascii(said)


@pytest.mark.parametrize("style", ["text", "json"])
def test_no_message_of_the_log_begins_a_line_of_its_own(style: str) -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        set_up_logging("info", style, clock=time.monotonic_ns, environment={}, stream=stream)
        logging.getLogger("xkv_gateway.target").info("SPDK target: %s", SPOKEN)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    [line] = stream.getvalue().splitlines()
    assert "evil" in line
    assert line.isprintable()
