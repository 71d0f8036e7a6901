"""The gateway in the guest, started by hand."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from .machine import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Guest

GATEWAY: Final = (sys.executable, "-m", "xkv_gateway")
CONFIG: Final = "/etc/xkv-gateway/gateway.toml"
FLAGS: Final = ("--config", CONFIG, "--state-dir", "/var/lib/xkv-test")
CARD_OFFLINE: Final = 6
LOG: Final = "/tmp/serve.log"


@contextlib.contextmanager
def serving(guest: Guest, *arguments: str) -> Iterator[None]:
    """Serve the card of `CONFIG` for the time of the block; at its end the card must be clean."""
    pid = guest.start(*GATEWAY, "serve", *FLAGS, *arguments, log=LOG)
    try:
        ready = f"grep Ctrl-C {LOG} || grep -q 'State:.Z' /proc/{pid}/status"
        assert guest.until("the gateway", ready), guest.sh(f"cat {LOG}")
        yield
    finally:
        code = guest.end(pid, timeout_s=HANG_S)
        log = guest.sh(f"cat {LOG}")
    assert code == 0, log
    assert "the card is clean" in log, log


def status_of(guest: Guest) -> dict[str, Any]:
    code, body = guest.fetch("http://127.0.0.1:5558/v1/status")
    assert code == 200, body
    return dict(json.loads(body))


def until_card(guest: Guest, state: str) -> None:
    """Wait until the gateway says so of its card."""
    guest.until(
        f"the card {state}",
        f"""{sys.executable} -c 'import json, urllib.request as u
card = json.load(u.urlopen("http://127.0.0.1:5558/v1/status", timeout=20))["card"]
print(card["state"], card["reason"])
raise SystemExit(card["state"] != "{state}")'""",
    )


def replay(guest: Guest, requests: int) -> None:
    """Play the packaged trace; every byte must come back right."""
    words = (*GATEWAY, "replay", "--json", "--limit", str(requests))
    done, ends = guest.run(*words, timeout_s=HANG_S), time.monotonic() + HANG_S
    while done.code == CARD_OFFLINE and time.monotonic() < ends:
        # A gateway that gets no time to look after its card says that it is offline.
        done = guest.run(*words, timeout_s=HANG_S)
    assert done.code == 0, done.out + done.err


def connections(guest: Guest) -> list[dict[str, Any]]:
    """Return what `fabric list` says."""
    return list(json.loads(guest.must(*GATEWAY, "fabric", "list", "--json")))
