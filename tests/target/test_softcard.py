from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from xkv_gateway.cardurl import SoftCardUrl, parse_card_url
from xkv_gateway.config import Config
from xkv_gateway.daemon.card import card_url
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


@pytest.mark.parametrize("place", ["none/such", "file"])
def test_a_place_where_no_card_can_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    url = f"soft:{tmp_path / place / 'card.img'}"
    config = Config.model_validate({"card": {"url": url}})
    if place == "file":
        assert card_url(config, tmp_path) == parse_card_url(url), "who opens it says why that cannot be"
        return
    with pytest.raises(
        CardUnavailableError, match=r"no soft card can be made in .*: No such file"
    ) as refused:
        card_url(config, tmp_path)
    assert "Make that directory" in refused.value.advice


def test_what_a_start_without_room_left_behind_is_a_new_card(tmp_path: Path) -> None:
    path = tmp_path / "card.img"
    path.touch()
    url = card_url(Config(), tmp_path)
    assert isinstance(url, SoftCardUrl)
    assert url.size_bytes is not None
    path.write_bytes(b"something")
    assert card_url(Config(), tmp_path) == SoftCardUrl(path, None)


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


@pytest.mark.parametrize(
    ("fault", "words"),
    [("gone", "does not exist"), ("empty", "is empty"), ("cut off", "its end was cut off")],
)
async def test_a_card_whose_file_is_not_the_one_any_more_is_not_made_anew_nor_hurried_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, words: str
) -> None:
    path, aside = tmp_path / "card.img", tmp_path / "aside.img"
    pauses: list[float] = []
    reasons: list[str] = []
    pause = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        reasons.append(card.facts.reason)
        if len(pauses) == 5:
            assert path.exists() is (fault != "gone")
            path.unlink(missing_ok=True)
            aside.rename(path)
        await pause(0)

    ticks = itertools.count(0, 3_600_000_000_000)
    card = SoftCard(path, 128 << 20, clock=lambda: next(ticks))  # whatever happens, it has lived for long
    ready = await card.start()
    os.kill(card.facts.pid or 0, signal.SIGSTOP)
    path.rename(aside)
    if fault != "gone":
        path.write_bytes(b"" if fault == "empty" else bytes(1 << 20))
    monkeypatch.setattr("xkv_gateway.target.softcard.asyncio.sleep", sleep)
    moved: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    keeper = asyncio.create_task(card.run(lambda host, port: moved.set_result((host, port))))
    os.kill(card.facts.pid or 0, signal.SIGKILL)
    async with asyncio.timeout(180):
        assert (await moved)[0] == ready.host
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert "SIGKILL" in reasons[0]
    assert all(words in reason for reason in reasons[1:])
    assert card.facts.reason == ""
    assert words in caplog.text
    keeper.cancel()
    await asyncio.wait((keeper,))
    await card.aclose()
