"""DH-HMAC-CHAP with Linux as the peer: our initiator and its target, its initiator and our soft card. A newer kernel than Debian 12 has."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

import pytest

from tests.nvmeof.hosts import HOST_NQN, connect
from xkv_nvmeof.dhchap.crypto import Group, Hash
from xkv_nvmeof.dhchap.host import Fault, HostKeys
from xkv_nvmeof.dhchap.secret import DhchapSecret, new_dhchap_secret
from xkv_nvmeof.initiator_errors import AuthenticationRefused

from .machine import booted
from .nvmet import ROOT, serving
from .packages import Unavailable
from .soft import HOST, HOST_ID, soft_card
from .soft import HOST_NQN as LINUX_NQN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Guest
    from .nvmet import Target

pytestmark = pytest.mark.guest

NQN: Final = "nqn.2014-08.com.example:authentication"
HOST_TEXT: Final = new_dhchap_secret(Hash.SHA_256, os.urandom)
CARD_TEXT: Final = new_dhchap_secret(Hash.SHA_512, os.urandom)
OTHER_TEXT: Final = new_dhchap_secret(Hash.SHA_256, os.urandom)
KEY, CARD_KEY, OTHER = (DhchapSecret.parse(text) for text in (HOST_TEXT, CARD_TEXT, OTHER_TEXT))
WISHES: Final = {
    Group.NULL: "null",
    Group.FFDHE2048: "ffdhe2048",
    Group.FFDHE3072: "ffdhe3072",
    Group.FFDHE4096: "ffdhe4096",
    Group.FFDHE6144: "ffdhe6144",
    Group.FFDHE8192: "ffdhe8192",
}
"""What Linux is told to use, as it writes them."""
KINDS: Final = [(kind, Group.FFDHE2048) for kind in Hash] + [
    (Hash.SHA_256, group) for group in Group if group is not Group.FFDHE2048
]
PATIENCE_MS: Final = 120_000
"""The guest's processor takes a second and more for a large group."""


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """A guest whose kernel has DH-HMAC-CHAP."""
    try:
        with booted(tmp_path_factory.mktemp("authentication"), authenticates=True) as machine:
            yield machine
    except Unavailable as error:
        pytest.skip(f"no guest with DH-HMAC-CHAP: {error}")


@pytest.fixture(scope="module")
def target(newer: Guest) -> Iterator[Target]:
    """A target that lets nobody but this host in, and this host with its key alone."""
    host = f"{ROOT}/hosts/{HOST_NQN}"
    with serving(newer, NQN) as target:
        subsystem = f"{ROOT}/subsystems/{NQN}"
        newer.sh(f"""
            mkdir {host}
            echo 0 > {subsystem}/attr_allow_any_host
            ln -s {host} {subsystem}/allowed_hosts/
            echo '{HOST_TEXT}' > {host}/dhchap_key
            echo '{CARD_TEXT}' > {host}/dhchap_ctrl_key
        """)
        yield target
        newer.sh(f"rm {subsystem}/allowed_hosts/{HOST_NQN}; rmdir {host}")


@pytest.mark.parametrize(("kind", "group"), KINDS)
async def test_both_prove_themselves_to_each_other_with_each_hash_and_group(
    target: Target, kind: Hash, group: Group
) -> None:
    host = f"{ROOT}/hosts/{HOST_NQN}"
    await asyncio.to_thread(
        target.guest.sh,
        f"echo 'hmac({kind.hashlib_name})' > {host}/dhchap_hash; echo {WISHES[group]} > {host}/dhchap_dhgroup",
    )
    # Linux does not take NULL from a host that offers nothing else.
    groups = tuple(Group) if group is Group.NULL else (group,)
    keys = HostKeys(KEY, CARD_KEY, (kind,), groups)
    device = await connect(target.host_port, NQN, dhchap=keys, connect_timeout_ms=PATIENCE_MS)
    await device.write_from(0, [memoryview(b"x" * 4096)])
    await device.aclose()


async def test_the_host_alone_proves_itself(target: Target) -> None:
    device = await connect(target.host_port, NQN, dhchap=HostKeys(KEY), connect_timeout_ms=PATIENCE_MS)
    await device.aclose()


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (HostKeys(OTHER), Fault.HOST_KEY),
        (HostKeys(KEY, OTHER), Fault.CONTROLLER_KEY),
        (None, Fault.HOST_KEY),
    ],
    ids=["wrong", "wrong of the target", "none"],
)
async def test_a_wrong_key_is_told_as_such(target: Target, keys: HostKeys | None, fault: Fault) -> None:
    with pytest.raises(AuthenticationRefused) as caught:
        await connect(target.host_port, NQN, dhchap=keys, connect_timeout_ms=PATIENCE_MS)
    assert caught.value.fault is fault


@pytest.mark.parametrize("mutual", [False, True], ids=["the host", "both"])
def test_linux_proves_itself_to_the_soft_card(newer: Guest, tmp_path: Path, mutual: bool) -> None:
    files = {"host.key": HOST_TEXT, "card.key": CARD_TEXT}
    for name, text in files.items():
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    flags = [f"--dhchap-key-file={tmp_path / 'host.key'}", f"--dhchap-ctrl-key-file={tmp_path / 'card.key'}"]
    with soft_card("64MiB", *flags) as card:
        where = ("--transport=tcp", f"--traddr={HOST}", f"--trsvcid={card['port']}", f"--nqn={card['nqn']}")
        identity = (f"--hostnqn={LINUX_NQN}", f"--hostid={HOST_ID}")

        def attempt(*secrets: str) -> int:
            return newer.run("nvme", "connect", *where, *identity, *secrets, timeout_s=300).code

        controller = [f"--dhchap-ctrl-secret={CARD_TEXT}"] if mutual else []
        assert attempt() != 0
        assert attempt(f"--dhchap-secret={OTHER_TEXT}", *controller) != 0
        if mutual:
            assert attempt(f"--dhchap-secret={HOST_TEXT}", f"--dhchap-ctrl-secret={OTHER_TEXT}") != 0
        assert attempt(f"--dhchap-secret={HOST_TEXT}", *controller) == 0
        node = newer.until(
            "the namespace",
            "set -- /sys/class/nvme-subsystem/*/nvme*n1; [ -b /dev/${1##*/} ]; echo -n /dev/${1##*/}",
        )
        newer.sh(f"dd if=/dev/urandom of={node} bs=1M count=2 oflag=direct status=none; sync")
        newer.must("nvme", "disconnect", f"--nqn={card['nqn']}")
