"""The units under a real systemd, in a guest of its own: start, watchdog, restart, reload, stop; and a card that Linux connects."""

from __future__ import annotations

import json
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.ports import held_port

from .machine import HANG_S, booted
from .packages import Unavailable
from .soft import HOST, settings, soft_card

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Guest

pytestmark = pytest.mark.guest

SITE: Final = next(path for path in sys.path if path.endswith("site-packages"))
CARD_OFFLINE: Final = 6
GATEWAY: Final = "xkv-gateway.service"
ATTACH: Final = "xkv-card-attach@gateway.service"
INSTANCE: Final = "xkv-gateway@soft.service"
CONFIG: Final = "/etc/xkv-gateway/gateway.toml"
KEYS: Final = "/etc/xkv-gateway/keys"
CREDENTIALS: Final = "/etc/credstore/xkv-gateway-soft"
LAUNCHER: Final = f"""#!/bin/sh
# Where services can see it (ProtectHome, PrivateTmp): the interpreter and the packages of this machine.
export PYTHONHOME=/srv/xkv/python LD_LIBRARY_PATH=/srv/xkv/python/lib PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=/srv/xkv/packages:/srv/xkv/site
exec /srv/xkv/python/bin/python{sys.version_info.major}.{sys.version_info.minor} -m xkv_gateway "$@"
"""
SOFT: Final = """
    [card]
    url = "soft:/var/lib/xkv-gateway/card.img?size=128MiB"
    [control]
    port = 5557
    [admin]
    port = 5558
"""
SLOW: Final = "[Service]\nTimeoutStartSec=300\nTimeoutStopSec=300\n"
SHORT_START: Final = "[Service]\nTimeoutStartSec=60\n"
"""Shorter than in the unit, and enough for a program to begin on an emulated processor."""
STARTING: Final = f"""
    [ "$(systemctl show {GATEWAY} --property=ActiveState --value)" = activating ]
    systemctl show {GATEWAY} --property=StatusText | grep 'waiting for the card: '
"""
LONGER_THAN_THE_START_MAY_TAKE: Final = f"""
    began=$(systemctl show {GATEWAY} --property=ExecMainStartTimestampMonotonic --value)
    [ "$(cut -d. -f1 /proc/uptime)" -gt $((began / 1000000 + 75)) ]
"""
WITH_KEYS: Final = f"""
[control.curve]
bind_address = "127.0.0.1"
port = 5569
keys = "{KEYS}"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """A guest whose first process is systemd, with the gateway installed as its operator would."""
    try:
        with booted(tmp_path_factory.mktemp("systemd"), systemd=True) as machine:
            machine.put("/usr/bin/xkv-gateway", LAUNCHER, 0o755)
            for name, place in (("python", sys.base_prefix), ("site", SITE), ("packages", machine.packages)):
                machine.sh(f"mkdir -p /srv/xkv/{name}; mount --bind {place} /srv/xkv/{name}")
            machine.must("xkv-gateway", "systemd", "install")
            machine.sh("systemd-sysusers; systemd-tmpfiles --create /etc/tmpfiles.d/xkv-gateway.conf")
            # Programs start slowly on an emulated processor.
            machine.put("/run/systemd/system/xkv-card-attach@.service.d/slow.conf", SLOW)
            machine.must("systemctl", "daemon-reload")
            yield machine
    except Unavailable as error:
        pytest.skip(f"no guest: {error}")


def show(machine: Guest, unit: str, *names: str) -> dict[str, str]:
    """Return properties of a unit."""
    lines = machine.must("systemctl", "show", unit, f"--property={','.join(names)}").splitlines()
    return dict(line.split("=", 1) for line in lines)


def status_of(machine: Guest, port: int = 5558) -> dict[str, Any]:
    code, body = machine.fetch(f"http://127.0.0.1:{port}/v1/status")
    assert code == 200, body
    return dict(json.loads(body))


def journal(machine: Guest, unit: str) -> str:
    return machine.must("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")


def logged(machine: Guest, unit: str, text: str, *fields: str) -> dict[str, str]:
    """Wait for an entry of the unit with these fields, and this in its message; return its fields."""
    found = machine.until(
        f"{text} in the journal",
        f"journalctl --no-pager --output=json --unit={unit} {' '.join(fields)} | grep -F '{text}'",
    )
    return dict(json.loads(found.splitlines()[-1]))


def moment(machine: Guest, unit: str, text: str) -> int:
    """Return when systemd last said this of a unit, in microseconds."""
    words = f"journalctl --no-pager --output=json _PID=1 UNIT={unit} | grep -F '{text}'"
    return int(json.loads(machine.until(text, words).splitlines()[-1])["__MONOTONIC_TIMESTAMP"])


def start(machine: Guest, unit: str) -> None:
    done = machine.run("systemctl", "start", unit, timeout_s=HANG_S)
    assert done.code == 0, done.err + journal(machine, unit)


def stop(machine: Guest, unit: str) -> None:
    """Stop it, and see that it ended by itself, in order, in the time that it has."""
    machine.must("systemctl", "stop", unit)
    ended = show(machine, unit, "Result", "ExecMainStatus", "ActiveState")
    assert ended == {"Result": "success", "ExecMainStatus": "0", "ActiveState": "inactive"}, journal(
        machine, unit
    )
    logged(machine, unit, "the card is clean")


def replay(machine: Guest, *arguments: str) -> None:
    """Play the packaged trace; every byte must come back right."""
    words = ("xkv-gateway", "replay", "--json", "--limit", "20", *arguments)
    done, ends = machine.run(*words, timeout_s=HANG_S), time.monotonic() + HANG_S
    while done.code == CARD_OFFLINE and time.monotonic() < ends:
        # A gateway that gets no time to look after its card says that it is offline.
        done = machine.run(*words, timeout_s=HANG_S)
    assert done.code == 0, done.out + done.err


def test_the_gateway_is_ready_restarted_by_the_watchdog_warm_reloaded_and_stopped(machine: Guest) -> None:
    machine.put(CONFIG, SOFT)
    # Shorter than in the unit, which says 30 seconds: nothing else is changed.
    machine.put(f"/run/systemd/system/{GATEWAY}.d/watchdog.conf", "[Service]\nWatchdogSec=20\n")
    machine.must("systemctl", "daemon-reload")
    start(machine, GATEWAY)
    # READY=1 came when everything answered.
    first = show(machine, GATEWAY, "MainPID", "StatusText", "ActiveState", "NRestarts")
    assert (first["ActiveState"], first["NRestarts"]) == ("active", "0")
    assert first["StatusText"].startswith("serving, card "), first
    assert status_of(machine)["state"] == "serving"
    said = f"systemctl show {GATEWAY} --property=StatusText | grep 'serving, card online, 0 objects'"
    machine.until("the state in a line", said)
    replay(machine)
    stored = status_of(machine)["usage"]["objects"]
    assert stored > 0

    machine.must("kill", "-STOP", first["MainPID"])
    again = f"""
        [ "$(systemctl show {GATEWAY} --property=NRestarts --value)" = 1 ]
        [ "$(systemctl is-active {GATEWAY})" = active ]
    """
    machine.until("the restart by the watchdog", again, timeout_s=HANG_S)
    logged(machine, GATEWAY, "atchdog timeout", "_PID=1")
    second = show(machine, GATEWAY, "MainPID")
    assert second["MainPID"] != first["MainPID"]
    status = status_of(machine)
    assert status["warm"]
    assert status["usage"]["objects"] == stored

    machine.put(CONFIG, SOFT + '\n[log]\nlevel = "debug"\n')
    machine.must("systemctl", "reload", GATEWAY)
    entry = logged(machine, GATEWAY, "reloaded", "XKV_EVENT=reload")
    assert (entry["LOGGER"], entry["PRIORITY"], entry["_PID"]) == (
        "xkv_gateway.audit",
        "6",
        second["MainPID"],
    )
    assert show(machine, GATEWAY, "MainPID", "ActiveState") == {**second, "ActiveState": "active"}
    replay(machine)
    logged(machine, GATEWAY, "a connection from", "PRIORITY=7", "XKV_EVENT=connection")
    stop(machine, GATEWAY)


def test_a_card_that_hangs_holds_up_no_stop(machine: Guest) -> None:
    machine.put(CONFIG, SOFT)
    start(machine, GATEWAY)
    replay(machine)
    card = machine.sh(f"pgrep -P $(systemctl show {GATEWAY} --property=MainPID --value)").strip()
    machine.must("kill", "-STOP", card)
    machine.must("systemctl", "stop", GATEWAY)
    ended = show(machine, GATEWAY, "Result", "ExecMainStatus", "ActiveState")
    # It ended by itself; systemd, which waits for 15 seconds, had nothing to do but to sweep.
    assert (ended["Result"], ended["ActiveState"]) in {("success", "inactive"), ("exit-code", "failed")}
    assert ended["ExecMainStatus"] in {"0", "75"}, journal(machine, GATEWAY)
    assert machine.run("kill", "-0", card).code != 0
    machine.must("systemctl", "reset-failed")
    start(machine, GATEWAY)
    assert status_of(machine)["warm"]
    stop(machine, GATEWAY)


def test_an_instance_has_its_own_user_directories_and_credentials(machine: Guest) -> None:
    token = uuid.uuid4().hex
    machine.must("xkv-gateway", "keys", "init", "--keys", KEYS)
    machine.must("xkv-gateway", "keys", "new", "alice", "--namespace", "replay", "--keys", KEYS)
    machine.sh(f"""
        sed -i s/16GiB/128MiB/ /etc/xkv-gateway/soft.toml
        mkdir -p /etc/credstore; chmod 700 /etc/credstore
        mv {KEYS}/server.key_secret {CREDENTIALS}.server.key_secret
        umask 077; echo {token} > {CREDENTIALS}.admin-token; cp {CREDENTIALS}.admin-token /root/token
    """)
    sample = machine.sh("cat /etc/xkv-gateway/soft.toml")
    machine.put("/etc/xkv-gateway/soft.toml", sample + WITH_KEYS)
    start(machine, INSTANCE)

    pid = show(machine, INSTANCE, "MainPID")["MainPID"]
    user = machine.must("stat", "--format=%u", f"/proc/{pid}").strip()
    assert int(user) >= 61184, "a user that is there for the service alone"
    assert machine.must("stat", "--format=%u %a", "/var/lib/private/xkv-gateway-soft").split() == [
        user,
        "700",
    ]
    assert machine.must("stat", "--format=%u", "/var/lib/xkv-gateway-soft/card.img").strip() == user
    assert machine.run("test", "-S", "/run/xkv-gateway-soft/control.sock").code == 0

    # Each credential is in effect, and nobody else reads it.
    assert machine.fetch("http://127.0.0.1:5568/v1/status")[0] == 401
    with_token = ("status", "--json", "--admin", "127.0.0.1:5568", "--token-file", "/root/token")
    status = json.loads(machine.must("xkv-gateway", *with_token))
    assert (status["state"], status["state_dir"]) == ("serving", "/var/lib/xkv-gateway-soft")
    as_other = ("setpriv", "--reuid=65534", "--clear-groups", "cat")
    assert machine.run(*as_other, f"/run/credentials/{INSTANCE}/admin-token").code != 0
    # As on the client's host: the copy that is here goes with the key.
    machine.must("cp", f"{KEYS}/alice.key_secret", "/root/alice.key_secret")
    key = ("--host", "127.0.0.1", "--port", "5569", "--key", "/root/alice.key_secret")
    replay(machine, *key)
    entry = logged(machine, INSTANCE, "a connection of key alice", "XKV_KEY=alice")
    assert entry["XKV_PEER"].startswith("127.0.0.1")
    assert machine.run("xkv-gateway", "replay", "--namespace", "other", "--limit", "1", *key).code == 10
    machine.must("xkv-gateway", "keys", "revoke", "alice", "--keys", KEYS)
    logged(machine, INSTANCE, "key alice is out", "XKV_EVENT=key_out")
    assert machine.run("xkv-gateway", "replay", "--limit", "1", *key, timeout_s=HANG_S).code == 3
    stop(machine, INSTANCE)
    start(machine, INSTANCE)
    status = json.loads(machine.must("xkv-gateway", *with_token))
    assert status["warm"]
    assert status["usage"]["objects"] > 0
    assert token not in journal(machine, INSTANCE)
    stop(machine, INSTANCE)


def test_a_card_that_linux_connects_for_a_gateway_without_privileges(machine: Guest) -> None:
    with soft_card("128MiB") as card:
        url = f"kernel+tcp://{HOST}:{card['port']}/{card['nqn']}?nsid=1"
        machine.put(CONFIG, settings(url))
        machine.sh(f"""
            mkdir -p /etc/systemd/system/{GATEWAY}.d
            cp /etc/xkv-gateway/kernel-card.conf /etc/systemd/system/{GATEWAY}.d/
            systemctl daemon-reload
        """)
        start(machine, ATTACH)
        flags = ("--config", CONFIG, "--state-dir", "/var/lib/xkv-card-attach")
        machine.must("xkv-gateway", "card", "format", url, *flags)
        start(machine, GATEWAY)
        card_status = status_of(machine)["card"]
        assert (card_status["state"], card_status["nqn"]) == ("online", card["nqn"])
        assert card_status["connection"]["connected by us"] is False
        pid = show(machine, GATEWAY, "MainPID")["MainPID"]
        assert machine.must("stat", "--format=%U", f"/proc/{pid}").strip() == "xkv-gateway"
        replay(machine)
        refused = machine.run("xkv-gateway", "fabric", "disconnect", *flags)
        assert (refused.code, "in use" in refused.err) == (6, True), refused.err
        # udev looks at a node that a writer has closed, and gives it to whom its rules name.
        machine.must("systemctl", "stop", GATEWAY)
        machine.must("udevadm", "settle")
        assert machine.sh("stat --format=%G:%a /dev/nvme*n1").strip() == "xkv-gateway:660"
        start(machine, GATEWAY)
        assert status_of(machine)["card"]["state"] == "online"
        # At the end of the machine both are stopped at once: the gateway first, whose card is still there then.
        machine.must("systemctl", "stop", GATEWAY, ATTACH)
        ended = show(machine, GATEWAY, "Result", "ExecMainStatus", "ActiveState")
        assert ended == {"Result": "success", "ExecMainStatus": "0", "ActiveState": "inactive"}
        logged(machine, GATEWAY, "the card is clean")
        assert moment(machine, GATEWAY, "Deactivated successfully") < moment(machine, ATTACH, "Stopping")
        assert show(machine, ATTACH, "Result", "ActiveState") == {
            "Result": "success",
            "ActiveState": "inactive",
        }
        assert json.loads(machine.must("xkv-gateway", "fabric", "list", "--json")) == []
        assert machine.sh("ls /run/udev/rules.d").split() == []


@pytest.mark.parametrize("scheme", ["nvme+tcp", "kernel+tcp"])
def test_a_card_that_comes_later_is_waited_for_longer_than_a_start_may_take(
    machine: Guest, tmp_path: Path, scheme: str
) -> None:
    with held_port() as port:
        arguments = ("--file", str(tmp_path / "card.img"), "--listen", f"127.0.0.1:{port}")
        with soft_card("128MiB", *arguments) as card:
            url = f"{scheme}://{HOST}:{port}/{card['nqn']}?nsid=1"
            machine.put(CONFIG, settings(url))
            flags = ("--config", CONFIG, "--state-dir", "/root/operator")
            machine.must("xkv-gateway", "card", "format", url, *flags)
        machine.put(f"/run/systemd/system/{GATEWAY}.d/start.conf", SHORT_START)
        machine.sh(f"""
            rm -f /etc/systemd/system/{GATEWAY}.d/kernel-card.conf
            if [ {scheme} = kernel+tcp ]; then
                mkdir -p /etc/systemd/system/{GATEWAY}.d
                cp /etc/xkv-gateway/kernel-card.conf /etc/systemd/system/{GATEWAY}.d/
            fi
            systemctl daemon-reload
            systemctl start --no-block {GATEWAY}
        """)
        machine.until("the wait", STARTING)
        pid = show(machine, GATEWAY, "MainPID")["MainPID"]
        assert machine.fetch("http://127.0.0.1:5558/healthz")[0] == 200
        assert machine.fetch("http://127.0.0.1:5558/readyz")[0] == 503
        machine.until("a long start", LONGER_THAN_THE_START_MAY_TAKE)
        machine.until("the wait, still", STARTING)
        with soft_card("128MiB", *arguments):
            machine.until("the start", f"systemctl is-active {GATEWAY}")
            assert show(machine, GATEWAY, "MainPID", "NRestarts") == {"MainPID": pid, "NRestarts": "0"}
            assert status_of(machine)["card"]["state"] == "online"
            replay(machine)
            stop(machine, GATEWAY)
            machine.sh(f"systemctl stop {ATTACH}; rm /run/systemd/system/{GATEWAY}.d/start.conf")
