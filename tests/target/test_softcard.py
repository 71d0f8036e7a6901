from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from xkv_gateway.errors import CardUnavailableError
from xkv_gateway.target.softcard import (
    DEFAULT_BYTES,
    LOG_LINES_PER_PERIOD,
    LOG_PERIOD_NS,
    SIZE_STEP_BYTES,
    SoftCard,
    _LogLimit,
    default_size,
)

if TYPE_CHECKING:
    from pathlib import Path


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("free_bytes", "size_bytes"),
    [(1 << 40, DEFAULT_BYTES), (10 << 30, (9 << 30)), (100 << 20, SIZE_STEP_BYTES)],
)
def test_the_default_card_is_as_large_as_the_disk_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, size_bytes: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(0, 0, free_bytes))
    assert default_size(tmp_path) == size_bytes


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(0, 0, 10 << 20))
    with pytest.raises(CardUnavailableError, match="no room for a soft card"):
        default_size(tmp_path)


def test_the_log_of_the_process_is_bounded_and_keeps_its_levels(caplog: pytest.LogCaptureFixture) -> None:
    now_ns = 0
    limit = _LogLimit(lambda: now_ns)
    with caplog.at_level(logging.INFO):
        limit.line("2026-01-01 00:00:00,000 WARNING xkv_nvmeof.softcard: the disk is full")
        for _ in range(1000):
            limit.line("2026-01-01 00:00:00,000 INFO xkv_nvmeof.softcard: again")
        assert len(caplog.records) == LOG_LINES_PER_PERIOD
        now_ns = LOG_PERIOD_NS
        limit.line("without a level")
    first, *_, told, last = caplog.records
    assert (first.levelname, first.getMessage()) == ("WARNING", "soft card: the disk is full")
    assert "981 more lines" in told.getMessage()
    assert last.getMessage() == "soft card: without a level"


async def test_a_process_that_does_not_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    card = SoftCard(tmp_path / "no" / "such" / "card.img", 128 << 20, clock=time.monotonic_ns)
    with pytest.raises(CardUnavailableError, match=r"card\.img did not start: .*[Nn]o such"):
        await card.start()
    assert card.facts.pid is None
    await card.aclose()


async def test_a_process_that_says_nothing_in_time_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xkv_gateway.target.softcard.START_TIMEOUT_S", 0)
    card = SoftCard(tmp_path / "card.img", 128 << 20, clock=time.monotonic_ns)
    with pytest.raises(CardUnavailableError, match="did not answer within 0 s"):
        await card.start()
    assert card.facts.pid is None
    await card.aclose()


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_file_that_is_no_soft_card_is_left_alone_and_the_advice_holds_for_every_command(
    tmp_path: Path, *, read_only: bool
) -> None:
    path = tmp_path / "photos.tar"
    path.write_bytes(b"\x5a" * (64 << 20))
    card = SoftCard(path, None, clock=time.monotonic_ns, read_only=read_only)
    with pytest.raises(CardUnavailableError, match="not a soft card") as refused:
        await card.start()
    await card.aclose()
    assert refused.value.advice is not None
    assert "left alone" in refused.value.advice
    assert "--card" not in refused.value.advice, "the commands of `card` have no such flag"
    assert ("soft:PATH" in refused.value.advice) is not read_only, (
        "who looks at a card has no use for another"
    )
    assert path.stat().st_size == 64 << 20
    assert path.read_bytes().count(0x5A) == 64 << 20


async def test_a_process_that_dies_again_and_again_is_started_again_and_moves(tmp_path: Path) -> None:
    card = SoftCard(tmp_path / "card.img", 128 << 20, clock=time.monotonic_ns)
    ready = await card.start()
    places: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    keeper = asyncio.create_task(card.run(lambda host, port: places.put_nowait((host, port))))
    async with asyncio.timeout(180):
        for restarts in (1, 2):
            pid = card.facts.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            host, _ = await places.get()
            assert host == ready.host
            assert card.facts.restarts == restarts
    keeper.cancel()
    await asyncio.wait((keeper,))
    await card.aclose()
    assert card.facts.pid is None
    await card.aclose()
