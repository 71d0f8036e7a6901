"""The log: one line an event on standard error, as text or JSON, bounded in rate, with a level that can change.

Records carry facts for machines as `extra` fields. Where standard error leads into systemd's journal, text is sent to it as
entries with fields; what it does not take becomes a line that begins with its priority.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from xkv_gateway.journald import JournalHandler
from xkv_process.text import ascii_only

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

AUDIT: Final = logging.getLogger("xkv_gateway.audit")
"""Who changed what: logged at every level."""

TEXT_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
JOURNAL_FORMAT: Final = "%(levelname)-7s %(name)s: %(message)s"
JOURNAL: Final = Path("/run/systemd/journal/socket")
IDENTIFIER: Final = "xkv-gateway"
BURST_LINES: Final = 20
"""Lines of one kind at once ..."""
LINES_PER_S: Final = 2.0
"""... and a second, for as long as it takes. Audit lines are never left out."""
KINDS_MAX: Final = 512
_NS_PER_S: Final = 1_000_000_000
_PRIORITIES: Final = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "suppressed"}


class RateLimit(logging.Filter):
    """Lets a bounded number of lines of each kind through; what was left out is said with the next one."""

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int, str], tuple[float, int, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written. A kind is a place in the code: logger, level and unfilled message."""
        if record.name == AUDIT.name:
            return True
        kind, now_ns = (record.name, record.levelno, str(record.msg)), self._clock()
        left, since_ns, suppressed = self._kinds.pop(kind, (float(BURST_LINES), now_ns, 0))
        left = min(BURST_LINES, left + (now_ns - since_ns) / _NS_PER_S * LINES_PER_S)
        passes = left >= 1
        self._kinds[kind] = (left - 1, now_ns, 0) if passes else (left, now_ns, suppressed + 1)
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        if passes and suppressed:
            record.suppressed = suppressed
            record.msg = f"{record.msg} ({suppressed} more lines like this were left out)"
        return passes


def facts(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields that a record was given for machines."""
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


def priority(level: int) -> int:
    """Return the severity of a level as syslog(3) and the journal count it."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= facts(record)
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    """Text, a line an event whatever a target or a client has called itself; a trace has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in `logging`
        """Return the line."""
        record.message = ascii_only(record.message)
        return super().formatMessage(record)


class JournalFormatter(TextFormatter):
    """Text with the priority that the journal reads off the front."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a trace stays one entry's worth of lines, each with its priority."""
        number = priority(record.levelno)
        return "\n".join(f"<{number}>{line}" for line in super().format(record).splitlines())


def set_up_logging(
    level: str,
    style: str,
    *,
    clock: Callable[[], int],
    environment: Mapping[str, str],
    stream: TextIO | None = None,
    journal: Path = JOURNAL,
) -> None:
    """Log to `stream` (standard error) from now on, or to the journal that it leads into.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        style: `text` or `json`.
        clock: monotonic nanoseconds.
        environment: of the process.
        stream: where to.
        journal: the journal's socket.
    """
    stream = sys.stderr if stream is None else stream
    handler: logging.Handler = logging.StreamHandler(stream)
    if style == "json":
        handler.setFormatter(JsonFormatter())
    elif _is_journal(stream, environment):
        handler.setFormatter(JournalFormatter(JOURNAL_FORMAT))
        handler = JournalHandler(journal, IDENTIFIER, facts=facts, priority=priority, fallback=handler)
    else:
        handler.setFormatter(TextFormatter(TEXT_FORMAT))
    handler.addFilter(RateLimit(clock))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Log from this severity on; audit lines always."""
    logging.getLogger().setLevel(level.upper())
    AUDIT.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether the stream leads into the journal (sd-daemon(3), JOURNAL_STREAM)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
