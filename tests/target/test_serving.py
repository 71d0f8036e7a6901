"""A gateway beside a target that misbehaves: it serves all the same, says what it found, and ends in time."""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.gateway import COMMAND, HANG_S, environment, run, serve_arguments, serving
from tests.e2e.target import target as card_process
from tests.target.fake_spdk import FakeSpdk, fake_spdk
from tests.target.model_spdk import ModelVolumes
from tests.target.settings import NQN
from xkv_gateway.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_rpc.async_client import AsyncClient

KEYS: Final = [bytes([number]) * 32 for number in range(8)]
LOOKUPS: Final = 3
"""So many are answered while one call to the target hangs: more than one cannot be, where lookups wait for it."""


def settings(home: Path, spdk: FakeSpdk, listener: str) -> Path:
    file = home / "gateway.toml"
    file.write_text(
        f"[target]\nrpc = '{spdk.path}'\nnqn = '{NQN}'\nlisteners = ['{listener}']\nallow_any_host = true\ninterval_s = 0.1\n"
        "[target.bdev]\nkind = 'aio'\nfile = '/srv/card.img'\n"
    )
    return file


class Hangs:
    """A script that answers nothing."""

    def __init__(self) -> None:
        self._socket = -1
        self._ends = select.poll()

    async def __call__(self, _: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        self._socket = writer.get_extra_info("socket").fileno()
        self._ends = select.poll()
        self._ends.register(self._socket, select.POLLRDHUP)
        await asyncio.Event().wait()
        return True

    @property
    def awaited(self) -> int | None:
        """Which connection it is on which somebody waits for an answer."""
        return None if self._socket < 0 or self._ends.poll(0) else self._socket


async def lookups_while_a_call_hangs(hangs: Hangs, client: AsyncClient) -> None:
    """Return once lookups were answered while one and the same call to the target hung."""
    async with asyncio.timeout(HANG_S):
        answered, before = 0, None
        while answered < LOOKUPS:
            assert (await client.lookup("", b"", KEYS)).hits == len(KEYS)
            now = hangs.awaited
            answered, before = (answered + 1 if now is not None and now == before else 0), now
            await asyncio.sleep(0.01)


def garbage(data: bytes) -> Any:
    async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        writer.close()
        return True

    return script


async def test_serve_makes_the_target_then_keeps_it_through_every_misbehaviour(home: Path) -> None:
    model = ModelVolumes()
    async with (
        fake_spdk(home / "spdk.sock", model.handle) as spdk,
        card_process(home / "card.img") as url,
    ):
        address = url.removeprefix("nvme+tcp://").partition("/")[0]
        file = str(settings(home, spdk, address))
        formatted = await run(
            home, "card", "format", url, "--state-dir", str(home / "state"), "--config", file
        )
        assert formatted.code == ExitCode.OK, formatted.err
        assert not model.subsystems, "only `serve` and `target apply` make anything"
        arguments = ("--config", file, "--card", url)
        async with (
            serving(home / "state", *arguments, card=None) as gateway,
            gateway.client() as client,
        ):
            assert model.subsystems[NQN]["listeners"], "made before the card is reached"
            await client.store("", b"", KEYS, [b"bytes"] * 8, timeout_ms=20_000)
            for script in (
                garbage(b'{"jsonrpc": "2.0", "id": 1, "resu'),
                garbage(b'{"id": 8, "result": {}}\n{"id": 7, "result": {}}\n'),
                garbage(b'{"id": 1, "result": [[[{"pid": "x"}]]]}\n'),
                garbage(b"\xff\xfe}"),
                garbage(b""),
            ):
                spdk.script = script
                calls = len(spdk.calls)
                while len(spdk.calls) < calls + 2:
                    assert (await client.lookup("", b"", KEYS)).hits == len(KEYS)
                    await asyncio.sleep(0.01)
            spdk.script = hangs = Hangs()
            await lookups_while_a_call_hangs(hangs, client)
            await gateway.logged("the SPDK target is away")
            told = (await gateway.status())["target"]
            assert (told["rpc"], told["state"], told["pid"]) == (str(spdk.path), "away", 1000)
            assert "xkv_target_right 0.0" in (await gateway.get("/metrics")).text
            assert "away: " in (await run(home, "status", "--admin", gateway.admin)).out
            assert await gateway.end() == ExitCode.OK, "a call that hangs does not hold the end"
            assert gateway.log_text.count("SPDK target is away") < 10


async def test_a_target_that_hangs_at_the_start_does_not_hold_up_a_stop(home: Path) -> None:
    async with fake_spdk(home / "spdk.sock", lambda *_: None) as spdk:
        spdk.script = Hangs()
        file = str(settings(home, spdk, "127.0.0.1:4420"))
        url = "nvme+tcp://127.0.0.1:1/nqn.2014-08.com.example:card0"
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, *serve_arguments(home / "state", None), "--config", file, "--card", url),
            env=environment(home),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(HANG_S):
            while not spdk.calls:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            process.terminate()
            assert await process.wait() == ExitCode.OK


async def test_a_target_that_is_away_at_the_start_is_told_and_the_card_tried(home: Path) -> None:
    async with card_process(home / "card.img") as url:
        address = url.removeprefix("nvme+tcp://").partition("/")[0]
        file = str(settings(home, FakeSpdk(home / "nobody.sock", lambda *_: None), address))
        await run(home, "card", "format", url, "--state-dir", str(home / "state"), "--config", file)
        arguments = ("--config", file, "--card", url)
        async with serving(home / "state", *arguments, card=None) as gateway:
            await gateway.logged("the SPDK target is away")
            assert (await gateway.get("/readyz")).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("target", "plan"), ExitCode.CONFIG, "target.rpc is not set"),
        (("target", "apply", "--config", "FILE"), ExitCode.TARGET, "Does it run"),
        (("target", "status", "--config", "FILE"), ExitCode.TARGET, "nobody.sock"),
        (("target", "destroy", "--yes", "--config", "FILE"), ExitCode.TARGET, "nobody.sock"),
        (
            ("serve", "--config", "FILE", "--card", "nvme+tcp://192.0.2.1/nqn.2014-08.com.example:c"),
            ExitCode.CONFIG,
            "192.0.2.1",
        ),
    ],
)
async def test_a_command_without_a_target_says_why(
    home: Path, arguments: tuple[str, ...], code: ExitCode, words: str
) -> None:
    file = str(settings(home, FakeSpdk(home / "nobody.sock", lambda *_: None), "127.0.0.1:4420"))
    more = (
        ("--port", "0", "--admin-port", "0", "--state-dir", str(home / "s"))
        if arguments[0] == "serve"
        else ()
    )
    finished = await run(home, *(file if word == "FILE" else word for word in arguments), *more)
    assert finished.code == code, finished
    assert words in finished.err
