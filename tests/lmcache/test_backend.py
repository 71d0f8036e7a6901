"""The plugin's way to a real gateway: scopes, holding, batches with holes. LMCache itself is in `tests/vllm`."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.gateway import HANG_S, serving
from tests.ports import held_port
from xkv_lmcache_plugin.backend import Backend, parse_params
from xkv_lmcache_plugin.keys import by_scope, key_of
from xkv_rpc.messages import scope_of
from xkv_vllm_connector.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SIZE = 70_000
PATIENT = {
    "lookup_timeout_ms": 30_000,
    "load_timeout_ms": 30_000,
    "store_timeout_ms": 30_000,
    "lease_ms": 60_000,
}
"""Nothing is late here, however slow the machine is."""


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


def keys(count: int, salt: str = "", seed: str = "") -> list[Key]:
    return [
        Key(hashlib.sha256(f"{seed}{number}".encode()).digest(), cache_salt=salt) for number in range(count)
    ]


def payloads(count: int, first: int = 1) -> list[memoryview]:
    return [memoryview(bytearray([first + number]) * SIZE) for number in range(count)]


def room(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE)) for _ in range(count)]


@asynccontextmanager
async def backend(port: int, **params: Any) -> AsyncIterator[Backend]:
    settings = parse_params({"xkv_gateway_port": port, "staging_bytes": 1 << 20, **PATIENT, **params})
    one = Backend(settings, time.monotonic_ns)
    yield one
    await asyncio.to_thread(one.close)


async def in_thread(function: Any, *arguments: Any) -> Any:
    async with asyncio.timeout(HANG_S):
        return await asyncio.to_thread(function, *arguments)


async def test_what_was_stored_is_found_by_the_same_salt_only_and_comes_back_byte_for_byte(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path / "state") as gateway, backend(gateway.control_port) as one:
        mine, mixed = keys(20, "a"), [*keys(20, "a")[:2], *keys(2, "b"), *keys(2)]
        outcome = await in_thread(one.store, mine, payloads(20))
        assert (sorted(outcome.written), outcome.complete) == (list(range(20)), True)
        again = await in_thread(one.store, mine, payloads(20))
        assert (again.written, again.complete) == ([], True)
        assert await in_thread(one.lookup, mixed) == [True, True, False, False, False, False]
        into = room(6)
        assert await in_thread(one.load, mixed, into) == [True, True, False, False, False, False]
        assert into[:2] == payloads(2)
        assert into[2] == room(1)[0]
        into = room(20)
        assert all(await in_thread(one.load, mine, into))
        assert into == payloads(20)


async def test_a_batch_with_holes_gives_what_there_is(tmp_path: Path) -> None:
    async with serving(tmp_path / "state") as gateway, backend(gateway.control_port) as one:
        every = keys(9, "a")
        await in_thread(one.store, every[::2], payloads(5))
        into = room(9)
        assert await in_thread(one.load, every, into) == [number % 2 == 0 for number in range(9)]
        assert into[::2] == payloads(5)
        other_size = [memoryview(bytearray(SIZE + 1)), *room(1)]
        assert await in_thread(one.load, [every[0], every[2]], other_size) == [False, True]


async def test_found_objects_are_held_until_all_of_them_are_let_go(tmp_path: Path) -> None:
    async with serving(tmp_path / "state") as gateway, backend(gateway.control_port) as one:
        mine = keys(4, "a")
        await in_thread(one.store, mine, payloads(4))
        await in_thread(one.lookup, mine)
        await in_thread(one.lookup, mine[:1])
        assert (await gateway.status())["usage"]["leases"] == 2
        await in_thread(one.unlock, mine[:3])
        assert (await gateway.status())["usage"]["leases"] == 2
        await in_thread(one.unlock, mine[3:])
        assert (await gateway.status())["usage"]["leases"] == 1
        await in_thread(one.unlock, mine[:1])
        await in_thread(one.unlock, mine)
        assert (await gateway.status())["usage"]["leases"] == 0
        assert one.status()["objects_held"] == 0


async def test_with_a_salt_required_nothing_unsalted_reaches_the_gateway(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "state") as gateway,
        backend(gateway.control_port, require_cache_salt=True) as one,
    ):
        unsalted = keys(2)
        outcome = await in_thread(one.store, unsalted, payloads(2))
        assert (outcome.written, outcome.complete) == ([], False)
        assert await in_thread(one.lookup, unsalted) == [False, False]
        assert await in_thread(one.load, unsalted, room(2)) == [False, False]
        assert 'op="store"} 0.0' in (await gateway.get("/metrics")).text


async def test_a_gateway_that_is_not_there_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    with held_port() as port:
        await comes_back(tmp_path, port)


async def comes_back(tmp_path: Path, port: int) -> None:
    async with backend(port) as one:
        mine = keys(2, "a")
        assert not (await in_thread(one.store, mine, payloads(2))).complete
        assert await in_thread(one.lookup, mine) == [False, False]
        assert await in_thread(one.load, mine, room(2)) == [False, False]
        async with serving(tmp_path / "state", "--port", str(port)), asyncio.timeout(HANG_S):
            while not (await in_thread(one.store, mine, payloads(2))).complete:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
            while await in_thread(one.lookup, mine) != [True, True]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)


async def test_another_model_rank_group_or_fingerprint_is_another_object(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "state") as gateway,
        backend(gateway.control_port) as one,
        backend(gateway.control_port, model_fingerprint="new weights") as other,
    ):
        (mine,) = keys(1, "a")
        await in_thread(one.store, [mine], payloads(1))
        strangers = [
            replace(mine, model_name="n"),
            replace(mine, kv_rank=1),
            replace(mine, object_group_id=1),
        ]
        assert await in_thread(one.lookup, [mine, *strangers]) == [True, False, False, False]
        assert await in_thread(other.lookup, [mine]) == [False]
        async with asyncio.timeout(HANG_S):
            client = gateway.client()
            found = await client.lookup("", scope_of("a"), [key_of(mine, "")])
            await client.aclose()
        assert found.hits == 1


def test_the_layout_of_a_key_does_not_change() -> None:
    key = Key(bytes(range(32)), "org/model", kv_rank=0x0203, object_group_id=5, cache_salt="a")
    head = hashlib.sha256()
    for part in (b"xkv-lmcache/1", b"org/model", b"v2"):
        head.update(len(part).to_bytes(4, "big") + part)
    expected = head.digest()[:16] + bytes.fromhex("0000000000000203 00000005") + bytes(range(32))
    assert key_of(key, "v2") == expected
    assert key_of(key, "") != key_of(replace(key, model_name="org/modelv2"), "")


def test_keys_of_one_salt_are_together_and_salts_that_cannot_be_used_are_nowhere() -> None:
    mixed = [*keys(1, "a"), *keys(1, "b"), *keys(1), *keys(1, "a", "other"), *keys(1, "\ud800")]
    found = dict(by_scope(mixed, require_salt=False))
    assert found == {scope_of("a"): [0, 3], scope_of("b"): [1], b"": [2]}
    assert b"" not in dict(by_scope(mixed, require_salt=True))


@pytest.mark.parametrize("hash_bytes", [0, 201])
def test_a_hash_that_does_not_fit_is_refused(hash_bytes: int) -> None:
    with pytest.raises(ValueError, match="chunk hash"):
        key_of(Key(bytes(hash_bytes)), "")


def test_a_setting_that_means_nothing_here_is_named() -> None:
    with pytest.raises(SettingsError, match="chunk_size"):
        parse_params({"chunk_size": 128})
