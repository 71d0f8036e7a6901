"""Linux is silent: opening, closing and tuning a device have an end all the same."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from xkv_nvmeof.blockdev import DeviceState
from xkv_nvmeof.initiator_errors import ConnectUnanswered
from xkv_nvmeof.kernel import sysfs
from xkv_nvmeof.kernel.ways import NodeWay, tune

from .devices import BACK_S, FileWay, connect, options
from .fake_sysfs import FakeSysfs

if TYPE_CHECKING:
    from pathlib import Path


def ended(name: str) -> None:
    """Wait for the threads of that name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(BACK_S)


async def test_a_node_that_linux_does_not_look_at_is_given_up_in_time_and_tried_by_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, released, stat = tmp_path / "nvme0n1", threading.Event(), os.stat

    def hanging(which: Any, **how: Any) -> os.stat_result:
        if which == path:
            assert released.wait(BACK_S)
        return stat(which, **how)

    monkeypatch.setattr(os, "stat", hanging)
    way = NodeWay(path, options(connect_timeout_ms=50), read_only=False)
    with pytest.raises(ConnectUnanswered, match="did not open it in time"):
        await way.open(None)
    with pytest.raises(ConnectUnanswered, match="an attempt from before"):
        await way.open(None)
    released.set()
    ended("card-open")
    with pytest.raises(ConnectUnanswered, match="No such file"):
        await way.open(None)


async def test_a_device_that_was_opened_too_late_is_given_back(
    loop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, opens = threading.Event(), os.open

    def hanging(which: Any, *how: Any, **more: Any) -> int:
        if which == loop:
            assert released.wait(BACK_S)
        return opens(which, *how, **more)

    monkeypatch.setattr(os, "open", hanging)
    way = NodeWay(loop, options(connect_timeout_ms=50), read_only=False)
    with pytest.raises(ConnectUnanswered, match="did not open it in time"):
        await way.open(None)
    released.set()
    ended("card-open")
    await asyncio.sleep(0)
    device = await connect(NodeWay(loop, options(), read_only=False))
    assert device.state is DeviceState.ONLINE
    await device.aclose()


async def test_a_device_that_linux_does_not_let_go_of_holds_up_no_end(way: FileWay) -> None:
    device = await connect(way, close_timeout_ms=100)
    assert way.file is not None
    way.file.closes.clear()
    await device.aclose()
    assert way.left == 1
    os.fstat(way.file.descriptor)
    way.file.closes.set()
    ended("card-close")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(way.file.descriptor)


async def test_times_that_linux_does_not_take_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeSysfs(tmp_path)
    fake.controller()
    place = tmp_path / "class/nvme/nvme0/fast_io_fail_tmo"
    place.unlink()
    os.mkfifo(place)
    monkeypatch.setattr(sysfs, "SYSFS", tmp_path)
    await tune("nvme0", options(connect_timeout_ms=50))
    assert "the times of nvme0 stay as they are" in caplog.text
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    ended("nvme-times")
    os.close(reader)
