"""The namespace of the card grows and shrinks while a gateway serves it, goes and comes back; and it shrinks while none does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.gateway import run, serve_arguments, serving
from tests.nvmeof.card_process import running_card
from xkv_gateway.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_rpc.async_client import AsyncClient

MIB = 1 << 20
KEYS = [b"object %02d" % number for number in range(40)]
SHORT = {"XKV_NVME__KEEP_ALIVE_MS": "4000"}
"""A run that was killed is settled after that."""


def payload_of(key: bytes) -> bytes:
    return key * (MIB // len(key))


async def loaded(client: AsyncClient, key: bytes) -> bytes:
    """Its bytes; none: a miss."""
    return bytes((await client.load("", b"tenant", [key])).payloads[0] or b"")


async def held(client: AsyncClient) -> set[bytes]:
    """What can be loaded; none of it has other bytes than were stored."""
    found = set()
    for key in KEYS:
        payload = await loaded(client, key)
        if payload:
            assert payload == payload_of(key)
            found.add(key)
    return found


async def test_a_card_that_shrinks_goes_on_with_what_is_left_and_one_that_shrank_unseen_is_adopted(
    home: Path,
) -> None:
    with running_card("--file", home / "card.img", "--size", "96MiB", "--exit-with-stdin") as card:
        url = f"nvme+tcp://127.0.0.1:{card.ready['port']}/{card.ready['nqn']}"
        state = str(home / "op")
        formatted = await run(home, "card", "format", url, "--state-dir", state, **SHORT)
        assert formatted.code == ExitCode.OK, formatted.err
        async with (
            serving(home / "state", "--card", url, card=None, **SHORT) as gateway,
            gateway.client() as client,
        ):
            for key in KEYS:
                assert await client.store("", b"tenant", [key], [payload_of(key)]) == ["stored"]
            before = await gateway.status()
            card.tell("resize 160MiB")
            await gateway.logged(f"{160 * MIB} bytes now")
            card.tell("resize 32MiB")
            after = await gateway.until(
                lambda now: (
                    now["usage"]["capacity_bytes"] < before["usage"]["capacity_bytes"]
                    and now["card"]["state"] == "online"
                    and now["usage"]["objects"] < len(KEYS)
                )
            )
            left = await held(client)
            assert 0 < len(left) == after["usage"]["objects"] < len(KEYS)
            # What is left can be used: what is gone is stored anew, and older things make room for it.
            gone = next(key for key in KEYS if key not in left)
            assert await client.store("", b"tenant", [gone], [payload_of(gone)]) == ["stored"]
            assert await loaded(client, gone) == payload_of(gone)
            card.tell("detach")
            await gateway.until(lambda now: now["card"]["state"] != "online")
            assert await loaded(client, gone) == b""
            card.tell("attach")
            await gateway.until(lambda now: now["card"]["state"] == "online")
            left = await held(client)
            assert gone in left
            assert await gateway.end() == ExitCode.OK
        checked = await run(home, "card", "check", url, "--payload", "--state-dir", state, **SHORT)
        assert checked.code == ExitCode.OK, checked.out + checked.err
        card.tell("resize 24MiB")
        refused = await run(home, *serve_arguments(home / "state", None), "--card", url, **SHORT)
        assert refused.code == ExitCode.CARD, refused.err
        assert "card adopt" in refused.err
        adopted = await run(home, "card", "adopt", url, "--yes", "--state-dir", state, **SHORT)
        assert adopted.code == ExitCode.OK, adopted.err
        assert "has become smaller" in adopted.out
        assert "another namespace" not in adopted.out
        async with (
            serving(home / "state", "--card", url, card=None, **SHORT) as gateway,
            gateway.client() as client,
        ):
            still = await held(client)
            assert still < left
            assert still
            assert await gateway.end() == ExitCode.OK
        checked = await run(home, "card", "check", url, "--payload", "--state-dir", state, **SHORT)
        assert checked.code == ExitCode.OK, checked.out + checked.err
