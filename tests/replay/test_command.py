from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.e2e.gateway import COMMAND, HANG_S, environment, run, serving
from tests.replay.memory_gateway import MemoryGateway
from tests.replay.memory_gateway import serving as serving_memory
from xkv_gateway.errors import ConfigError, ExitCode
from xkv_gateway.replay.command import _where, replay
from xkv_gateway.replay.generate import PACKAGED
from xkv_gateway.replay.progress import show_progress
from xkv_gateway.replay.run import Where
from xkv_gateway.replay.stats import ReplayStats
from xkv_gateway.replay.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

CARD = "1GiB"
OWN_STRUCTURES_BYTES = 64 * 2**20


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: the socket of the regions must fit into 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="xkv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def leading_blocks_seen_before(limit: int | None = None) -> tuple[int, int, int]:
    """Blocks, leading blocks that earlier prompts had, distinct blocks: counted with nothing but a set."""
    seen: set[int] = set()
    blocks = hits = 0
    for line in gzip.decompress(PACKAGED.read_bytes()).decode().splitlines()[:limit]:
        prompt = json.loads(line)["hash_ids"]
        blocks += len(prompt)
        for block in prompt:
            if block not in seen:
                break
            hits += 1
        seen.update(prompt)
    return blocks, hits, len(seen)


async def test_the_packaged_trace_hits_exactly_what_a_set_counts_and_the_card_moved_these_bytes(
    home: Path,
) -> None:
    blocks, hits, distinct = leading_blocks_seen_before()
    async with serving(home / "s", card=CARD) as gateway:
        before = await gateway.status()
        done = await run(home, "replay", "--port", str(gateway.control_port), "--json")
        after = await gateway.status()
    assert (done.code, done.err) == (ExitCode.OK, "")
    outcome = json.loads(done.out)
    assert outcome["transfer"] == "region"
    assert outcome["blocks_asked"] == blocks
    assert outcome["hits"] == outcome["blocks_loaded"] == outcome["blocks_verified"] == hits
    assert outcome["trace"]["leading_repeats"] == hits
    assert outcome["stores"]["stored"] == distinct
    assert outcome["mismatches"] == 0
    assert outcome["complete"] is True
    assert (outcome["bytes_loaded"], outcome["bytes_stored"]) == (hits * 65536, distinct * 65536)
    assert after["cache"]["stored_bytes"] - before["cache"]["stored_bytes"] == outcome["bytes_stored"]
    for direction, moved in (
        ("read_bytes", outcome["bytes_loaded"]),
        ("write_bytes", outcome["bytes_stored"]),
    ):
        on_the_card = after["device"][direction] - before["device"][direction]
        # The card's own structures come on top: little beside the payload.
        assert moved <= on_the_card < moved + OWN_STRUCTURES_BYTES


async def test_blocks_of_an_odd_size_go_inline_and_a_second_replay_finds_everything_warm(home: Path) -> None:
    blocks, hits, distinct = leading_blocks_seen_before(limit=12)
    arguments = ("replay", "--limit", "12", "--inline", "--block-bytes", "10007", "--scope", "ab01", "--json")
    async with serving(home / "s", card=CARD) as gateway:
        port = ("--port", str(gateway.control_port))
        cold = json.loads((await run(home, *arguments, *port)).out)
        warm = json.loads((await run(home, *arguments, *port)).out)
        other = json.loads((await run(home, *arguments, *port, "--scope", "cd")).out)
        people = await run(home, "replay", "--limit", "5", *port)
    assert cold["transfer"] == "inline"
    assert (cold["hits"], cold["blocks_verified"], cold["blocks_stored"]) == (hits, hits, distinct)
    assert (warm["hits"], warm["blocks_verified"], warm["blocks_stored"]) == (blocks, blocks, 0)
    assert other["hits"] == hits, "another scope begins cold"
    assert (people.code, people.err) == (ExitCode.OK, "")
    assert "verified, byte for byte" in people.out
    assert "p99" in people.out


async def test_a_gateway_that_goes_away_in_the_middle_is_said_with_what_was_done(home: Path) -> None:
    trace = home / "t.jsonl"
    requests = [
        {"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [1]} for at in (0, 0, 1e7)
    ]
    trace.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    async with serving(home / "s", card="256MiB") as gateway:
        port = str(gateway.control_port)
        arguments = ("replay", str(trace), "--speed", "1", "--json", "--port", port)
        async with asyncio.TaskGroup() as group:
            replaying = group.create_task(run(home, *arguments))
            await gateway.until(lambda status: bool(status["requests"].get("release")))
            await gateway.end(signal.SIGKILL)
    done = replaying.result()
    assert done.code == ExitCode.UNREACHABLE
    # The answer to the second request's last message may or may not have arrived.
    assert re.search(rf"the gateway at 127\.0\.0\.1:{port} went away after [12] requests", done.err)
    assert "Traceback" not in done.err
    outcome = json.loads(done.out)
    assert (outcome["complete"], outcome["blocks_verified"]) == (False, 1)
    assert outcome["requests"] in {1, 2}


async def test_bytes_that_are_not_those_stored_have_an_exit_code_of_their_own(home: Path) -> None:
    gateway = MemoryGateway(spoil=lambda _, data: data[:-1] + bytes([data[-1] ^ 0x80]))
    async with serving_memory(gateway):
        done = await run(home, "replay", "--limit", "2", "--block-bytes", "1KB", "--port", str(gateway.port))
    assert done.code == ExitCode.MISMATCH
    assert "differs from byte 999 on" in done.out


async def test_a_replay_that_is_interrupted_still_says_what_it_did(home: Path) -> None:
    trace = home / "t.jsonl"
    requests = [
        {"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [1]} for at in (0, 0, 1e7)
    ]
    trace.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    async with serving(home / "s", card="256MiB") as gateway:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *("replay", str(trace), "--speed", "1", "--json", "--port", str(gateway.control_port)),
            env=environment(home),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await gateway.until(lambda status: bool(status["requests"].get("release")))
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(HANG_S):
            out, err = await process.communicate()
    assert process.returncode == ExitCode.FORCED
    assert re.fullmatch(r"xkv-gateway: stopped after [12] requests\n", err.decode())
    assert json.loads(out)["blocks_verified"] == 1


def test_the_progress_bar_is_shown_only_where_a_person_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    trace = Trace("t", [TraceRequest(0, 0, 0, [1])] * 4)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        with show_progress(trace) as on_progress:
            on_progress(ReplayStats(requests=3, blocks_asked=4, blocks_hit=1))
        assert ("3/4" in stream.getvalue() and "25.0 %" in stream.getvalue()) is shown
        assert bool(stream.getvalue()) is shown


async def test_no_gateway_is_one_clear_line(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        done = await run(home, "replay", "--limit", "1", "--port", str(port))
    assert done.code == ExitCode.UNREACHABLE
    assert done.out == "", "tables of zeros"
    assert f"no gateway answers at 127.0.0.1:{port}" in done.err
    assert "xkv-gateway serve" in done.err
    assert "--key" in done.err
    assert "Traceback" not in done.err


async def test_a_bad_trace_is_said_before_a_gateway_is_asked(home: Path) -> None:
    trace = home / "bad.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}\n')
    done = await run(home, "replay", str(trace))
    assert (done.code, done.out) == (ExitCode.CONFIG, "")
    (line,) = done.err.splitlines()
    assert f"{trace}, line 1: field 'hash_ids': item 0 must be an integer" in line


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--block-bytes", "64XB", "is not a size"),
        ("--block-bytes", "0", "between 1 byte and 1 GiB"),
        ("--block-bytes", "2GiB", "between 1 byte and 1 GiB"),
        ("--speed", "fast", "neither `max` nor"),
        ("--speed", "0", "neither `max` nor"),
        ("--speed", "nan", "neither `max` nor"),
        ("--limit", "0", "0 is not in the range"),
        ("--concurrency", "0", "0 is not in the range"),
        ("--namespace", "n" * 65, "at most 64 bytes"),
        ("--scope", "my-secret-salt", "not a scope in hexadecimal"),
        ("--scope", "ab" * 33, "longer than 32 bytes"),
        ("--scope", b"_default".hex(), "is reserved"),
        ("--timeout", "nan", "is not a number"),
        ("--port", "0", "0 is not in the range"),
    ],
)
def test_a_bad_option_is_named(option: str, value: str, problem: str) -> None:
    result = CliRunner().invoke(replay, [option, value])
    assert result.exit_code == 2
    assert option in result.output
    assert problem in " ".join(result.output.split())
    assert "secret" not in result.output


def test_the_control_port_comes_from_the_settings_unless_an_option_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('[control]\nbind_address = "0.0.0.0"\nport = 6001\nallow_unauthenticated = true\n')
    assert _where(None, None, settings) == Where("127.0.0.1", 6001)
    assert _where("::1", None, settings) == Where("::1", 6001)
    assert _where("::1", 6002, settings) == Where("::1", 6002)
    monkeypatch.setenv("XKV_CONTROL__PORT", "6003")
    assert _where(None, None, settings) == Where("127.0.0.1", 6003)
    monkeypatch.delenv("XKV_CONTROL__PORT")
    settings.write_text('[control]\nopen = false\nsocket = "/run/x/control.sock"\n')
    assert _where(None, None, settings) == Where("", 0, "/run/x/control.sock")
    assert _where(None, 6004, settings) == Where("127.0.0.1", 6004)


async def test_a_gateway_with_nothing_but_a_unix_socket_is_replayed_against(home: Path) -> None:
    path = home / "control.sock"
    async with serving(home / "s", card=CARD, XKV_CONTROL__OPEN="false", XKV_CONTROL__SOCKET=str(path)):
        done = await run(home, "replay", "--socket", str(path), "--limit", "20", "--json")
    assert (done.code, done.err) == (ExitCode.OK, "")
    outcome = json.loads(done.out)
    assert (outcome["transfer"], outcome["complete"], outcome["mismatches"]) == ("region", True, 0)
    gone = await run(home, "replay", "--socket", str(path))
    assert gone.code == ExitCode.UNREACHABLE
    assert str(path) in gone.err
    assert "tcp" not in gone.err


@pytest.mark.parametrize("other", [("--port", "1"), ("--host", "h"), ("--key", "k")])
def test_a_unix_socket_stands_instead_of_a_port(other: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="--socket"):
        CliRunner().invoke(replay, ["--socket", "s", *other], catch_exceptions=False)


@pytest.mark.parametrize("path", ["", "@abstract", "s" * 108])
def test_a_unix_socket_that_cannot_be_is_a_wrong_option(path: str) -> None:
    with pytest.raises(ConfigError, match=r"path|PATH|socket"):
        CliRunner().invoke(replay, ["--socket", path], catch_exceptions=False)
