"""A card that Linux reaches goes away and comes back while it is in use: every call ends, nothing that was acknowledged is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from .daemon import CONFIG, FLAGS, GATEWAY, LOG, connections, serving, status_of, until_card
from .nvmet import serving as target_serving
from .soft import settings

if TYPE_CHECKING:
    from .machine import Guest

pytestmark = pytest.mark.guest

NQN: Final = "nqn.2014-08.com.example:loss"
PORT: Final = 4421
LOAD: Final = Path(__file__).with_name("load.py")
PROGRESS, END, REPORT = "/tmp/load.progress", "/tmp/load.end", "/tmp/load.report"
SHORT: Final = "keep_alive_ms = 4000"
UPTIME: Final = "cut -d. -f1 /proc/uptime"
HELD_S_MAX: Final = 120
"""A call may wait for Linux, which gives up after half of the keep-alive time. Much more than that would be a hang."""


def test_a_card_that_is_lost_and_returns_under_load_costs_nothing_that_was_acknowledged(guest: Guest) -> None:
    with target_serving(guest, NQN, port=PORT, disk="/dev/ram1") as target:
        url = f"kernel+tcp://127.0.0.1:{PORT}/{NQN}?nsid=1"
        guest.put(CONFIG, settings(url, SHORT, networks=""))
        guest.must(*GATEWAY, "card", "format", url, *FLAGS)
        with serving(guest):
            guest.sh(f"rm -f {PROGRESS} {END}")
            pid = guest.start(sys.executable, str(LOAD), "5557", PROGRESS, END, log=REPORT)
            for _ in range(2):
                good, failed = until_progress(guest, good=1)
                target.leave()
                until_card(guest, "offline")
                # It is answered all the time, with errors.
                good, failed = until_progress(guest, failed=failed + 20)
                target.come_back()
                until_card(guest, "online")
                until_progress(guest, good=good + 40)
            guest.sh(f"touch {END}")
            guest.until("the end of the load", f"! kill -0 {pid} 2>/dev/null || grep -q missing {REPORT}")
            report = json.loads(guest.sh(f"cat {REPORT}"))
            assert (report["wrong"], report["missing"]) == (0, []), (report, guest.sh(f"cat {LOG}"))
            assert report["longest_s"] < HELD_S_MAX, report
            assert not {"internal", "bad_request"} & set(report["said"]), report
            # What was written before the loss may still land until then; a card is not clean before.
            late_s = status_of(guest)["card"]["connection"]["late_ms"] // 1000
            over_s = int(guest.sh(UPTIME)) + late_s + 1
            guest.until("the end of what may land late", f'[ "$({UPTIME})" -gt {over_s} ]')
        assert connections(guest) == []


def until_progress(guest: Guest, *, good: int = 0, failed: int = 0) -> tuple[int, int]:
    """Wait until so many keys were stored, and so many answers were errors; return both numbers."""
    script = f'read good failed < {PROGRESS}; [ "$good" -ge {good} ] && [ "$failed" -ge {failed} ] && echo $good $failed'
    now = guest.until(f"{good} good and {failed} failed", script).split()
    return int(now[0]), int(now[1])
