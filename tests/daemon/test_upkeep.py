"""Signs of life come from the loop that serves; a reload takes what can change, and leaves the rest as it was."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from typing import TYPE_CHECKING, cast

import pytest

from tests.service.fake_status import FakeSource
from xkv_gateway.config import Config
from xkv_gateway.daemon.notify import Notifier
from xkv_gateway.daemon.ports import TokenBox
from xkv_gateway.daemon.upkeep import Reloader, keep_told
from xkv_gateway.errors import ConfigError
from xkv_gateway.logs import AUDIT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xkv_gateway.daemon.ports import Ports

TOKEN = "w" * 32


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind(str(tmp_path / "notify"))
        yield listener, str(tmp_path / "notify")


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)
    AUDIT.setLevel(logging.NOTSET)


def drained(listener: socket.socket) -> list[str]:
    said: list[str] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            said.append(listener.recv(65536).decode())
    return said


async def test_a_loop_that_does_not_run_gives_no_sign_of_life(manager: tuple[socket.socket, str]) -> None:
    listener, path = manager
    notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "60000"}, time.monotonic_ns)
    telling = asyncio.create_task(keep_told(notifier, FakeSource().status))
    loop = asyncio.get_running_loop()
    said: list[str] = []
    while said.count("WATCHDOG=1") < 3:
        said.append((await loop.sock_recv(listener, 65536)).decode())
    assert any(line.startswith("STATUS=") for line in said)
    drained(listener)
    ends = time.monotonic() + 0.2
    while time.monotonic() < ends:
        pass  # the loop is stuck
    assert not drained(listener)
    while (await loop.sock_recv(listener, 65536)) != b"WATCHDOG=1":
        continue  # the state is told every second as well
    telling.cancel()


def test_a_reload_takes_the_level_and_says_what_needs_a_restart(
    manager: tuple[socket.socket, str], caplog: pytest.LogCaptureFixture
) -> None:
    listener, path = manager
    notifier = Notifier({"NOTIFY_SOCKET": path}, time.monotonic_ns)
    now = Config.model_validate({"log": {"level": "debug"}})
    reloader = Reloader(Config(), lambda: now, notifier)
    reloader.reload()
    assert logging.getLogger().level == logging.DEBUG
    assert [line.split("\n")[0] for line in drained(listener)] == ["RELOADING=1"]
    assert "restart" not in caplog.text
    reloader.ready()
    now = Config.model_validate({"control": {"port": 1}})
    reloader.reload()
    assert [line.split("\n")[0] for line in drained(listener)] == ["READY=1", "RELOADING=1", "READY=1"]
    assert "after a restart" in caplog.text


def test_once_the_end_has_begun_nothing_is_read_and_nobody_hears_of_readiness(
    manager: tuple[socket.socket, str],
) -> None:
    def load() -> Config:
        pytest.fail("read again")

    listener, path = manager
    reloader = Reloader(Config(), load, Notifier({"NOTIFY_SOCKET": path}, time.monotonic_ns))
    reloader.ready()
    reloader.stopping()
    reloader.reload()
    assert drained(listener) == ["READY=1", "STOPPING=1"]


async def test_behind_its_block_a_reload_means_what_it_meant_before() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Reloader(Config(), None, Notifier({}, time.monotonic_ns)).signals():
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_settings_that_cannot_be_read_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> Config:
        raise ConfigError("log.level = 5: must be text")

    logging.getLogger().setLevel(logging.WARNING)
    Reloader(Config(), load, Notifier({}, time.monotonic_ns)).reload()
    assert logging.getLogger().level == logging.WARNING
    assert "log.level = 5" in caplog.text


def test_tokens_that_vanish_do_not_open_the_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "admin-token").write_text(TOKEN)
    box = TokenBox(Config(), tmp_path)
    (tmp_path / "admin-token").unlink()

    class OnlyTokens:
        tokens = box
        keys = None

    reloader = Reloader(Config(), None, Notifier({}, time.monotonic_ns))
    reloader.opened(cast("Ports", OnlyTokens()))
    reloader.reload()
    assert "not reloaded" in caplog.text
    assert box.now().role(TOKEN) == "write"
