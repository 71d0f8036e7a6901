"""The log: JSON for machines, priorities for the journal, a bound on the rate, audit lines always."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.logs import AUDIT, BURST_LINES, KINDS_MAX, RateLimit, set_level, set_up_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TextIO


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        if handler not in kept:
            handler.close()
    root.handlers[:] = kept
    root.setLevel(level)
    AUDIT.setLevel(logging.NOTSET)


def clock_at(times: list[int]) -> Callable[[], int]:
    return lambda: times[-1]


def test_json_lines_are_one_object_each_with_the_facts_and_the_trace() -> None:
    stream = io.StringIO()
    set_up_logging("info", "json", clock=clock_at([0]), environment={}, stream=stream)
    log = logging.getLogger("xkv_gateway.test")
    log.info("the card is %s\nnow", "online", extra={"event": "card", "state": "online"})
    try:
        raise ValueError("why")  # noqa: TRY301 - something to log
    except ValueError:
        log.exception("failed")
    log.debug("not this")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 2
    assert lines[0]["message"] == "the card is online\nnow"
    assert (lines[0]["level"], lines[0]["event"], lines[0]["state"]) == ("info", "card", "online")
    assert lines[0]["time"].endswith("Z")
    assert "ValueError: why" in lines[1]["trace"]


def test_the_level_changes_while_it_runs_and_audit_lines_always_appear() -> None:
    stream = io.StringIO()
    set_up_logging("error", "text", clock=clock_at([0]), environment={}, stream=stream)
    log = logging.getLogger("xkv_gateway.test")
    log.info("one")
    AUDIT.info("two")
    set_level("debug")
    log.debug("three")
    set_level("error")
    log.info("four")
    assert [line.rsplit(" ", 1)[1] for line in stream.getvalue().splitlines()] == ["two", "three"]


def test_a_flood_of_one_kind_is_cut_and_counted_and_others_pass() -> None:
    times = [0]
    limit = RateLimit(clock_at(times))

    def passes(message: str, name: str = "x") -> tuple[bool, str]:
        record = logging.LogRecord(name, logging.INFO, "f", 1, message, (), None)
        return limit.filter(record), record.getMessage()

    assert sum(passes("flood")[0] for _ in range(1000)) == BURST_LINES
    assert passes("another")[0]
    assert all(passes("flood", AUDIT.name)[0] for _ in range(1000))
    times.append(1_000_000_000)
    passed, text = passes("flood")
    assert passed
    assert f"{1000 - BURST_LINES} more lines" in text
    for number in range(10 * KINDS_MAX):
        passes(f"kind {number}")
    assert len(limit._kinds) == KINDS_MAX


def log_into(journal: Path, stream: TextIO) -> None:
    """Log where the stream is said to lead into the journal."""
    found = os.fstat(stream.fileno())
    environment = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
    set_up_logging(
        "info", "text", clock=clock_at([0]), environment=environment, stream=stream, journal=journal
    )


def test_into_the_journal_goes_an_entry_with_the_facts_as_fields(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal,
        (tmp_path / "lines").open("w") as stream,
    ):
        journal.bind(str(tmp_path / "journal"))
        log_into(tmp_path / "journal", stream)
        extra = {"event": "knock", "peer-address": "10.0.0.1", "mode": 7}
        logging.getLogger("xkv_gateway.test").warning("two\nlines %d", 1, extra=extra)
        AUDIT.info("done")
        first, second = journal.recv(65536), journal.recv(65536)
    message = [b"MESSAGE", b"\x0b" + bytes(7) + b"two", b"lines 1"]
    fields = [b"PRIORITY=4", b"SYSLOG_IDENTIFIER=xkv-gateway", b"LOGGER=xkv_gateway.test", b"XKV_EVENT=knock"]
    fields += [b"XKV_PEER_ADDRESS=10.0.0.1", b"XKV_MODE=7", b""]
    assert first.split(b"\n") == message + fields
    assert second.startswith(b"MESSAGE=done\nPRIORITY=6\n")
    assert not (tmp_path / "lines").read_text()


def test_what_the_journal_does_not_take_becomes_lines_with_priorities(tmp_path: Path) -> None:
    with (tmp_path / "lines").open("w") as stream:
        log_into(tmp_path / "nobody", stream)
        logging.getLogger("xkv_gateway.test").warning("a trace", exc_info=ValueError("of no use"))
        logging.getLogger("xkv_gateway.test").info("one\nline")
    assert [line[:3] for line in (tmp_path / "lines").read_text().splitlines()] == ["<4>", "<4>", "<6>"]


def test_an_entry_that_no_datagram_can_hold_is_not_lost(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal,
        (tmp_path / "lines").open("w") as stream,
    ):
        journal.bind(str(tmp_path / "journal"))
        log_into(tmp_path / "journal", stream)
        logging.getLogger("xkv_gateway.test").warning("x" * (8 << 20))
    assert len((tmp_path / "lines").read_text()) > 8 << 20
