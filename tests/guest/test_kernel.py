"""Linux's initiator against our soft card, and the gateway on a card that Linux reaches, in the guest."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.ports import held_port
from xkv_nvmeof.kernel.nvmecli import parse_view
from xkv_nvmeof.kernel.view import Peer, Wanted, namespace_of, path_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Guest

pytestmark = pytest.mark.guest

HOST: Final = "10.0.2.2"
"""This machine, as the guest sees it."""
HOST_ID: Final = uuid.UUID("0c0ffee0-0000-4000-8000-000000000001")
HOST_NQN: Final = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"
IDENTITY: Final = (f"--hostnqn={HOST_NQN}", f"--hostid={HOST_ID}")
GATEWAY: Final = (sys.executable, "-m", "xkv_gateway")


@pytest.fixture
def card(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A soft card of this machine; what it says of itself."""
    with soft_card("--memory", "--size", "256MiB") as ready:
        yield ready


@contextlib.contextmanager
def soft_card(*arguments: str) -> Iterator[dict[str, Any]]:
    command = (sys.executable, "-m", "xkv_nvmeof.softcard", *arguments, "--exit-with-stdin")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.terminate()


@pytest.fixture
def node(guest: Guest, card: dict[str, Any]) -> Iterator[str]:
    """The soft card, connected by the guest; its node there."""
    where = ("--transport=tcp", f"--traddr={HOST}", f"--trsvcid={card['port']}", f"--nqn={card['nqn']}")
    guest.must("nvme", "connect", *where, *IDENTITY, "--keep-alive-tmo=10", "-o", "json")
    yield guest.until(
        "the namespace",
        "set -- /sys/class/nvme-subsystem/*/nvme*n1; [ -b /dev/${1##*/} ]; echo -n /dev/${1##*/}",
    )
    guest.must("nvme", "disconnect", f"--nqn={card['nqn']}")
    assert not json.loads(guest.must("nvme", "list-subsys", "-o", "json") or "[]")


@pytest.mark.smoke
def test_linux_discovers_the_soft_card(guest: Guest, card: dict[str, Any]) -> None:
    where = ("--transport=tcp", f"--traddr={HOST}", f"--trsvcid={card['port']}")
    found = json.loads(guest.must("nvme", "discover", *where, *IDENTITY, "-o", "json"))
    assert card["nqn"] in {record["subnqn"] for record in found["records"]}


@pytest.mark.smoke
def test_linux_identifies_it_as_it_is(guest: Guest, card: dict[str, Any], node: str) -> None:
    controller = json.loads(guest.must("nvme", "id-ctrl", node, "-o", "json"))
    assert controller["subnqn"] == card["nqn"]
    namespace = json.loads(guest.must("nvme", "id-ns", node, "-n", "1", "-o", "json"))
    assert namespace["nsze"] * 4096 == 256 << 20
    # What nvme-cli tells of it in JSON is what sysfs tells.
    subsystems, devices = (
        guest.must("nvme", *words, "-o", "json").encode() for words in (("list-subsys",), ("list", "-v"))
    )
    view = parse_view(subsystems, devices, "of the guest")
    path = path_of(view, Peer(card["nqn"], HOST, card["port"], HOST_NQN, HOST_ID.bytes))
    assert path is not None
    assert path.live
    found = namespace_of(view, Wanted(card["nqn"], 1))
    assert found is not None
    assert (f"/dev/{found.node}", found.size_bytes, found.block_bytes) == (node, 256 << 20, 4096)


def test_a_file_system_on_it_keeps_what_it_is_given(guest: Guest, node: str) -> None:
    guest.sh(f"""
        mkfs.ext4 -q -E nodiscard {node}
        mkdir -p /mnt/card
        mount -o discard {node} /mnt/card
        cd /mnt/card
        dd if=/dev/urandom of=random bs=1M count=24 conv=fsync status=none
        sha256sum random > sums
        cp -r /usr/lib/x86_64-linux-gnu/perl-base . 2>/dev/null || cp -r /usr/share/doc/adduser .
        find . -type f ! -name sums -print0 | xargs -0 sha256sum > sums
        dd if=/dev/urandom of=gone bs=1M count=8 conv=fsync status=none
        rm gone
        fstrim -v .
        sync
        cd /; umount /mnt/card
        e2fsck -fn {node} >/dev/null
        mount -o ro {node} /mnt/card
        cd /mnt/card; sha256sum --quiet -c sums
        cd /; umount /mnt/card
    """)


@pytest.mark.smoke
def test_mixed_writes_of_all_sizes_are_read_back(guest: Guest, node: str) -> None:
    script = f"""
import mmap, os, random
rng = random.Random(7)
fd = os.open({node!r}, os.O_RDWR | os.O_DIRECT)
size, block = 64 << 20, 4096
kept = bytearray(size)
os.pwritev(fd, [kept_map := mmap.mmap(-1, 1 << 20)], 0)
for at in range(0, size, 1 << 20):
    os.pwritev(fd, [kept_map], at)
for _ in range(150):
    length = rng.choice([1, 1, 2, 8, 32, 256, 512]) * block
    at = rng.randrange((size - length) // block) * block
    buffer = mmap.mmap(-1, length)
    if rng.random() < 0.6:
        buffer[:] = rng.randbytes(length)
        assert os.pwritev(fd, [buffer], at) == length
        kept[at:at + length] = buffer[:]
        if rng.random() < 0.1:
            os.fdatasync(fd)
    else:
        assert os.preadv(fd, [buffer], at) == length
        assert buffer[:] == kept[at:at + length], at
print("same")
"""
    assert guest.must(sys.executable, "-c", script) == "same\n"


def settings(card: dict[str, Any], url: str) -> str:
    return f"""
        [card]
        url = "{url}"
        [fabric]
        networks = ["10.0.2.0/24"]
        [nvme]
        host_nqn = "{HOST_NQN}"
        host_id = "{HOST_ID}"
        [control]
        port = 5557
        [admin]
        port = 5558
    """


def status_of(guest: Guest) -> dict[str, Any]:
    code, body = guest.fetch("http://127.0.0.1:5558/v1/status")
    assert code == 200, body
    return dict(json.loads(body))


def test_the_gateway_serves_a_card_that_linux_connects_and_disconnects_it_at_its_end(
    guest: Guest, card: dict[str, Any]
) -> None:
    url = f"kernel+tcp://{HOST}:{card['port']}/{card['nqn']}?nsid=1"
    guest.put("/etc/xkv-gateway/gateway.toml", settings(card, url))
    flags = ("--config", "/etc/xkv-gateway/gateway.toml", "--state-dir", "/var/lib/xkv-test")
    said = guest.must(*GATEWAY, "card", "format", url, *flags)
    assert "formatted" in said.lower()
    assert not json.loads(guest.must("nvme", "list-subsys", "-o", "json") or "[]"), (
        "the format left it connected"
    )
    pid = guest.start(*GATEWAY, "serve", *flags, log="/tmp/serve.log")
    try:
        guest.until("the gateway", "grep -q Ctrl-C /tmp/serve.log")
        report = json.loads(guest.must(*GATEWAY, "replay", "--json", "--limit", "60", timeout_s=180))
        assert report["mismatches"] == 0, report
        card_status = status_of(guest)["card"]
        assert card_status["state"] == "online"
        assert card_status["connection"]["connected by us"] is True
        assert card_status["connection"]["io_timeout_ms"] == 10_000
        assert card_status["nqn"] == card["nqn"]
        assert "connected by this gateway" in " ".join(guest.must(*GATEWAY, "status").split())
    finally:
        code = guest.end(pid)
        log = guest.sh("cat /tmp/serve.log")
    assert code == 0, log
    assert "the card is clean" in log
    assert not json.loads(guest.must("nvme", "list-subsys", "-o", "json") or "[]"), log


def test_a_target_that_comes_later_than_the_gateway_is_waited_for(guest: Guest, tmp_path: Path) -> None:
    flags = ("--config", "/etc/xkv-gateway/gateway.toml", "--state-dir", "/var/lib/xkv-test")
    with held_port() as port:
        arguments = ("--file", str(tmp_path / "card.img"), "--listen", f"127.0.0.1:{port}")
        with soft_card(*arguments, "--size", "256MiB") as card:
            url = f"kernel+tcp://{HOST}:{port}/{card['nqn']}?nsid=1"
            guest.put("/etc/xkv-gateway/gateway.toml", settings(card, url))
            guest.must(*GATEWAY, "card", "format", url, *flags)
        pid = guest.start(*GATEWAY, "serve", *flags, "--card-wait", "always", log="/tmp/late.log")
        try:
            guest.until("the wait", "grep -q 'the start waits for its card' /tmp/late.log")
            with soft_card(*arguments):
                guest.until("the gateway", "grep -q Ctrl-C /tmp/late.log")
                assert status_of(guest)["card"]["state"] == "online"
                code = guest.end(pid)
        finally:
            log = guest.sh("cat /tmp/late.log")
    assert code == 0, log
