"""Nobody reads, changes or notices what is another's: every operation, crossed over, on the real stack.

Each test has its positive control: the owner gets what it stored, so that a stack that loses everything fails as well.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import httpx
import pytest

from tests.e2e.gateway import serving
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import LookupMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.e2e.gateway import Gateway
    from xkv_rpc.async_client import AsyncClient

KEY: Final = b"one key"
SAME: Final = b"the same bytes for everybody" * 100

HOMES: Final = (
    ("a", b"bc"),
    ("ab", b"c"),
    ("abc", b""),
    ("", b"abc"),
    ("", b""),
    ("a:b", b"c"),
    ("a", b"b:c"),
    ("a/b", b"c"),
    ("a", b"/bc"),
    ("a\0", b"b"),
    ("a", b"\0b"),
    ("61", b"bc"),
    ("a", b"6263"),
    ("A", b"bc"),
    ("ä", b"bc"),
    ("a", b"bc\0"),
    ("tenant1", b"\x01"),
    ("tenant10", b"\x01"),
    ("tenant1", b"\x010"),
    ("n" * 64, b"s" * 32),
    ("n" * 64, b"s" * 31),
    ("n" * 63, b"s" * 32),
)
"""Namespaces and scopes that are prefixes of each other, or equal when they are joined, quoted or spelled in hexadecimal."""

KEYS: Final = (b"k", b"k\0", b"kk", b"\0k", b"K", b"6b", b"bck", b"ck", b":k", b"k" * 256, b"k" * 255)


@pytest.fixture
async def gateway(home: Path) -> AsyncIterator[Gateway]:
    async with serving(home / "state") as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    async with gateway.client() as client:
        yield client


def payload(namespace: str, scope: bytes, key: bytes) -> bytes:
    """Return bytes that say whose they are."""
    return repr((namespace, scope, key)).encode()


async def loaded(client: AsyncClient, home: tuple[str, bytes], key: bytes, **more: bytes) -> bytes | None:
    result = await client.load(*home, [key], **more)
    return None if result.payloads[0] is None else bytes(result.payloads[0])


async def test_names_that_only_look_alike_are_different_objects_with_bytes_of_their_own(
    client: AsyncClient,
) -> None:
    for namespace, scope in HOMES:
        keys = list(KEYS)
        statuses = await client.store(
            namespace, scope, keys, [payload(namespace, scope, key) for key in keys]
        )
        assert set(statuses) == {"stored"}
    for namespace, scope in HOMES:
        result = await client.load(namespace, scope, list(KEYS))
        got = [bytes(found) for found in result.payloads if found is not None]
        assert got == [payload(namespace, scope, key) for key in KEYS]
    # One goes; all others stay.
    gone = ("tenant1", b"\x01")
    assert await client.delete(*gone, list(KEYS)) == len(KEYS)
    for home in HOMES:
        hits = (await client.lookup(*home, list(KEYS), mode=LookupMode.EACH)).hits
        assert hits == (0 if home == gone else len(KEYS))


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (("ns", b"mine"), ("ns", b"theirs")),
        (("mine", b"s"), ("theirs", b"s")),
        (("ns", b""), ("ns", b"\0")),
        (("", b"s"), ("s", b"")),
    ],
)
async def test_every_operation_on_anothers_object_is_a_miss(
    client: AsyncClient, mine: tuple[str, bytes], others: tuple[str, bytes]
) -> None:
    assert await client.store(*mine, [KEY], [SAME]) == ["stored"]
    lease = (await client.lookup(*mine, [KEY], lease_ms=30_000)).lease
    assert lease is not None

    for mode in LookupMode:
        crossed = await client.lookup(*others, [KEY], mode=mode, lease_ms=1000)
        missed = await client.lookup(*others, [b"never stored"], mode=mode, lease_ms=1000)
        assert crossed == missed
        assert (crossed.hits, crossed.lease) == (0, None)
    assert await client.load(*others, [KEY]) == await client.load(*others, [b"never stored"])
    # Also with the lease of its owner in hand, and through shared memory.
    assert await loaded(client, others, KEY, lease=lease) is None
    with await client.attach_region(len(SAME)) as region:
        region.view[:] = b"\xa5" * len(SAME)
        result = await client.load_into(*others, [KEY], region.token, [0], [len(SAME)], lease=lease)
        assert [status.value for status in result.statuses] == ["miss"]
        assert bytes(region.view) == bytes(len(SAME))
        result = await client.load_into(*mine, [KEY], region.token, [0], [len(SAME)], lease=lease)
        assert bytes(region.view) == SAME  # the control
    assert await client.delete(*others, [KEY]) == 0
    assert await loaded(client, mine, KEY) == SAME

    # The same bytes under the same key are stored again, not shared.
    assert await client.store(*others, [KEY], [SAME]) == ["stored"]
    assert await client.store(*others, [KEY], [b"other bytes"]) == ["exists"]
    assert await client.delete(*others, [KEY]) == 1
    assert await loaded(client, mine, KEY) == SAME
    assert await loaded(client, others, KEY) is None
    assert await loaded(client, mine, KEY, lease=lease) == SAME


async def test_a_lease_covers_the_namespace_and_scope_that_it_was_given_for_only(client: AsyncClient) -> None:
    homes = (("ns", b"a"), ("ns", b"b"), ("other", b"a"))
    leases = []
    for home in homes:
        await client.store(*home, [KEY], [payload(*home, KEY)])
        leases.append((await client.lookup(*home, [KEY], lease_ms=30_000)).lease)
    for (home, own), (other, lease) in itertools.product(
        zip(homes, leases, strict=True), zip(homes, leases, strict=True)
    ):
        assert own is not None
        assert lease is not None
        expected = payload(*home, KEY) if home == other else None
        assert await loaded(client, home, KEY, lease=lease) == expected


async def test_one_tenants_wipe_and_quota_leave_the_other_alone(
    gateway: Gateway, client: AsyncClient
) -> None:
    mine, others, same_scope = ("ns", b"\x01"), ("ns", b"\x02"), ("ns2", b"\x01")
    for home in (mine, others, same_scope):
        await client.store(*home, [KEY], [payload(*home, KEY)])
    async with httpx.AsyncClient(base_url=f"http://{gateway.admin}", trust_env=False, timeout=30) as admin:
        assert (await admin.put("/quota/scope:02", json={"limit_gb": 0})).status_code == 200
        assert await client.store(*others, [b"more"], [SAME]) == ["over_quota"]
        assert await client.store(*mine, [b"more"], [SAME]) == ["stored"]
        assert (await admin.delete("/v1/namespaces/ns?scope=01")).json()["objects"] == 2
    assert await loaded(client, mine, KEY) is None
    assert await loaded(client, same_scope, KEY) == payload(*same_scope, KEY)


async def test_bearer_tokens_that_are_guessed_open_nothing(client: AsyncClient) -> None:
    home = ("ns", b"a")
    await client.store(*home, [KEY], [SAME])
    lease = (await client.lookup(*home, [KEY], lease_ms=30_000)).lease
    assert lease is not None
    for guess in (bytes(16), bytes([lease[0] ^ 1]) + lease[1:], lease[::-1]):
        assert await loaded(client, home, KEY, lease=guess) is None
        for request in (m.Renew(guess, 1000), m.Release(guess)):
            with pytest.raises(RpcError) as error:
                await client.call(request)
            assert error.value.code is ErrorCode.UNKNOWN_LEASE
    assert await loaded(client, home, KEY, lease=lease) == SAME


async def test_freed_space_never_shows_what_another_left_there(client: AsyncClient) -> None:
    for round_number in range(20):
        left = b"\xaa" * (3 << 16)
        await client.store("ns", b"a", [b"left"], [left])
        await client.delete("ns", b"a", [b"left"])
        # Fewer bytes than a unit, in the space that was just freed.
        short = bytes([round_number]) * 4097
        await client.store("ns", b"b", [b"%d" % round_number], [short])
        assert await loaded(client, ("ns", b"b"), b"%d" % round_number) == short
