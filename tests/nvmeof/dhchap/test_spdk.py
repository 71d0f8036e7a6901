"""Authentication with SPDK's target: right and wrong keys, both directions, every hash and group that it has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.nvmeof.dhchap.exchange import Counted
from tests.nvmeof.hosts import HOST_NQN, connect
from tests.nvmeof.spdk_target import spdk_target
from xkv_nvmeof.dhchap.crypto import Group, Hash
from xkv_nvmeof.dhchap.host import Fault, HostKeys
from xkv_nvmeof.dhchap.secret import DhchapSecret, new_dhchap_secret
from xkv_nvmeof.initiator_errors import AuthenticationRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.spdk
HOST_TEXT = new_dhchap_secret(Hash.SHA_512, Counted("host"))
CARD_TEXT = new_dhchap_secret(None, Counted("card"))
HOST, CARD = DhchapSecret.parse(HOST_TEXT), DhchapSecret.parse(CARD_TEXT)
OTHER = DhchapSecret.parse(new_dhchap_secret(Hash.SHA_256, Counted("other")))


@pytest.fixture(scope="module")
def spdk() -> Iterator[tuple[int, str]]:
    if "XKV_SPDK_TGT" not in os.environ:
        pytest.skip("XKV_SPDK_TGT names no nvmf_tgt binary")
    with spdk_target(keys=(HOST_NQN, HOST_TEXT, CARD_TEXT)) as target:
        yield target


@pytest.mark.parametrize("group", list(Group))
@pytest.mark.parametrize("kind", list(Hash))
async def test_both_prove_themselves_with_each_hash_and_group(
    spdk: tuple[int, str], kind: Hash, group: Group
) -> None:
    device = await connect(*spdk, dhchap=HostKeys(HOST, CARD, (kind,), (group,)))
    await device.write_from(0, [memoryview(b"x" * 4096)])
    assert device.queues_granted == 2
    await device.aclose()


async def test_the_host_alone_proves_itself(spdk: tuple[int, str]) -> None:
    device = await connect(*spdk, dhchap=HostKeys(HOST))
    await device.aclose()


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (HostKeys(OTHER), Fault.HOST_KEY),
        (HostKeys(HOST, OTHER), Fault.CONTROLLER_KEY),
        (None, Fault.HOST_KEY),
    ],
    ids=["wrong", "wrong of the target", "none"],
)
async def test_a_wrong_key_is_told_as_such(
    spdk: tuple[int, str], keys: HostKeys | None, fault: Fault
) -> None:
    with pytest.raises(AuthenticationRefused) as caught:
        await connect(*spdk, dhchap=keys)
    assert caught.value.fault is fault
