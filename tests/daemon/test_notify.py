"""What systemd is told, over a real notify socket of either form; and that nothing depends on its being there."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.daemon.notify import STATUS_CHARACTERS_MAX, Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket of the service manager, and how it is named in the environment."""
    abstract = request.param == "abstract"
    name = f"@xkv-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:] if abstract else name)
        listener.settimeout(5)
        yield listener, name


def clock() -> int:
    return 5_000_000


def test_every_message_reaches_the_manager(manager: tuple[socket.socket, str]) -> None:
    listener, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3000000"}, clock)
    assert notifier.watchdog_s == 3
    notifier.status("opening\nthe card")
    notifier.status("opening the card")
    notifier.ready()
    notifier.alive()
    notifier.reloading()
    notifier.stopping()
    notifier.status("x" * 10_000)
    said = [listener.recv(65536).decode() for _ in range(6)]
    assert said[:5] == [
        "STATUS=opening the card",
        "READY=1",
        "WATCHDOG=1",
        "RELOADING=1\nMONOTONIC_USEC=5000",
        "STOPPING=1",
    ]
    assert len(said[5]) == STATUS_CHARACTERS_MAX + len("STATUS=")


@pytest.mark.parametrize("value", ["", "relative", "/nowhere/notify", "@xkv-nobody-listens", "/" + "x" * 200])
def test_a_manager_that_cannot_be_reached_is_no_reason_to_fail(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": value}, clock)
    for _ in range(3):
        notifier.ready()
    assert len(caplog.records) <= 1
    Notifier({}, clock).ready()


@pytest.mark.parametrize(
    ("environment", "expected_s"),
    [
        ({}, 0),
        ({"WATCHDOG_USEC": "x"}, 0),
        ({"WATCHDOG_USEC": "-1"}, 0),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}, 1),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, 0),
    ],
)
def test_the_watchdog_is_fed_only_where_it_is_ours(environment: dict[str, str], expected_s: float) -> None:
    assert Notifier(environment, clock).watchdog_s == expected_s


def test_a_full_manager_blocks_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "n"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "1000000"}, clock)
        for _ in range(5000):
            notifier.alive()
