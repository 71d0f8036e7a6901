from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

from tests.e2e.commands import command
from tests.e2e.gateway import Finished, run, serve_arguments, serving
from tests.e2e.target import target
from xkv_gateway.errors import ExitCode
from xkv_nvmeof.softcard.store import TRAILER_BYTES, StoreIdentity

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
SIZE_BYTES = 64 * MIB
KEYS = [bytes([number]) * 32 for number in range(8)]
PAYLOADS = [bytes([number]) * 70_000 for number in range(8)]


async def filled(home: Path, file: Path) -> str:
    """Make a soft card with KEYS on it; return its URL."""
    url = f"soft:{file}?size=64MiB"
    async with serving(home / "maker", "--card", url, card=None) as gateway:
        client = gateway.client()
        assert set(await client.store("", b"", KEYS, PAYLOADS)) == {"stored"}
        await client.aclose()
        assert await gateway.end() == ExitCode.OK
    return f"soft:{file}"


def overwrite(file: Path, offset_bytes: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset_bytes)
        stream.write(data)


def trailer(file: Path) -> StoreIdentity:
    return StoreIdentity.from_bytes(file.read_bytes()[-TRAILER_BYTES:])


def resize(file: Path, size_bytes: int) -> None:
    """Give the namespace another size, as an administrator of a target can."""
    identity = trailer(file)
    grown = StoreIdentity(identity.block_bytes, size_bytes, identity.nguid, identity.uuid)
    with file.open("r+b") as stream:
        stream.truncate(min(size_bytes, identity.size_bytes))
        stream.truncate(size_bytes)
        stream.seek(size_bytes)
        stream.write(grown.to_bytes())


def exchange_ids(file: Path) -> None:
    """Make it another namespace with the same bytes, as a copy on a target is."""
    identity = trailer(file)
    other = StoreIdentity(identity.block_bytes, identity.size_bytes, b"\x0b" * 16, b"\x0c" * 16)
    overwrite(file, identity.size_bytes, other.to_bytes())


async def refused(home: Path, url: str, *words: str) -> Finished:
    """Check that `serve` leaves the card alone, and says why."""
    finished = await run(home, *serve_arguments(home / "other", None), "--card", url)
    assert finished.code == ExitCode.CARD
    assert all(word in finished.err for word in words), finished.err
    assert "Traceback" not in finished.err
    return finished


async def info(home: Path, url: str) -> dict[str, Any]:
    finished = await command(home, "card", "info", url, "--json")
    assert finished.code == ExitCode.OK, finished.err
    return dict(json.loads(finished.out))


async def test_a_look_and_a_check_tell_all_and_change_nothing_on_disk(home: Path) -> None:
    file = home / "card.img"
    url = await filled(home, file)
    before = (hashlib.sha256(file.read_bytes()).digest(), file.stat().st_mtime_ns)
    facts = await info(home, url)
    assert facts["kind"] == "card"
    assert facts["card"]["clean"]
    assert not facts["card"]["lives"]
    assert (facts["card"]["objects"], facts["card"]["objects_exact"]) == (len(KEYS), True)
    assert facts["card"]["owner"]["host_nqn"].startswith("nqn.2014-08.org.nvmexpress:uuid:")
    assert "8 objects" in (await command(home, "card", "info", url)).out
    checked = await command(home, "card", "check", url, "--payload", "--json")
    assert checked.code == ExitCode.OK
    report = json.loads(checked.out)
    assert (report["result"], report["findings"], report["notes"]) == ("clean", [], [])
    assert report["counts"]["payload_bytes"] == sum(map(len, PAYLOADS))
    assert "clean" in (await command(home, "card", "check", url)).out
    assert (hashlib.sha256(file.read_bytes()).digest(), file.stat().st_mtime_ns) == before
    assert not (home / ".local").exists()


async def test_damage_is_a_finding_and_an_exit_code_and_costs_the_next_start_only_what_it_covers(
    home: Path,
) -> None:
    file = home / "card.img"
    url = await filled(home, file)
    place = file.read_bytes().index(PAYLOADS[3])
    overwrite(file, place + 5, b"X")
    assert (await command(home, "card", "check", url)).code == ExitCode.OK
    checked = await command(home, "card", "check", url, "--payload", "--json")
    assert checked.code == ExitCode.DEGRADED
    assert [finding["code"] for finding in json.loads(checked.out)["findings"]] == ["payload_damaged"]
    text = await command(home, "card", "check", url, "--payload")
    assert "FINDING payload_damaged" in text.out
    overwrite(file, 100, b"damage")
    assert "superblock_damaged" in (await command(home, "card", "check", url)).out
    async with serving(home / "state", "--card", url, card=None) as gateway:
        client = gateway.client()
        loaded = await client.load("", b"", KEYS)
        assert loaded.statuses == ["ok"] * 3 + ["corrupt"] + ["ok"] * 4
        await client.aclose()


async def test_while_a_gateway_has_a_card_it_is_looked_at_from_outside_and_never_checked_or_changed(
    home: Path,
) -> None:
    file = home / "card.img"
    async with target(file) as url:
        assert (await command(home, "card", "format", url)).code == ExitCode.OK
        async with serving(home / "state", "--card", url, card=None):
            assert (await info(home, url))["card"]["lives"]
            for name in ("check", "adopt"):
                finished = await command(home, "card", name, url)
                assert finished.code == ExitCode.CARD
                assert "lives" in finished.err
            for name in ("info", "check", "format", "adopt"):
                finished = await command(home, "card", name, f"soft:{file}")
                assert finished.code == ExitCode.CARD
                assert "in use" in finished.err
                assert "Traceback" not in finished.err


async def test_a_forced_format_with_takeover_ends_the_gateway_that_has_the_card(home: Path) -> None:
    short = {"XKV_NVME__KEEP_ALIVE_MS": "2000", "XKV_NVME__COMMAND_TIMEOUT_MS": "2000"}
    async with target(home / "card.img") as url:
        await command(home, "card", "format", url)
        async with serving(home / "state", "--card", url, card=None, **short) as gateway:
            arguments = ("card", "format", url, "--force", "--takeover", "--label", "new")
            formatted = await command(home, *arguments, **short)
            assert formatted.code == ExitCode.OK, formatted.err
            assert "waiting 4 s" in formatted.err
            assert await gateway.process.wait() == ExitCode.CARD_LOST
            await gateway.logged("taken over")
        assert (await info(home, url))["card"]["label"] == "new"
        alone = await command(home, "card", "format", url, "--takeover")
        assert (alone.code, "--force" in alone.err) == (ExitCode.CONFIG, True)


async def test_a_card_that_was_copied_to_another_namespace_is_refused_until_it_is_adopted(home: Path) -> None:
    file = home / "card.img"
    await filled(home, file)
    copy = home / "copy.img"
    shutil.copy(file, copy)
    exchange_ids(copy)
    url = f"soft:{copy}"
    await refused(home, url, "formatted on", "card adopt")
    assert "wrong_namespace" in (await command(home, "card", "check", url)).out
    asked = await command(home, "card", "adopt", url)
    assert asked.code == ExitCode.REFUSED  # nobody is there to answer
    assert "nobody can be asked here" in asked.err
    assert "8 objects" in asked.out
    await refused(home, url, "card adopt")
    adopted = await command(home, "card", "adopt", url, "--yes")
    assert adopted.code == ExitCode.OK, adopted.err
    assert "adopted" in adopted.out
    assert "needs no adoption" in (await command(home, "card", "adopt", url, "--yes")).out
    async with serving(home / "state", "--card", url, card=None) as gateway:
        assert "warm: 8 objects" in gateway.said_at("card")
    original = await command(home, "card", "check", f"soft:{file}", "--payload")
    assert original.code == ExitCode.OK


async def test_a_copy_of_a_soft_cards_file_is_the_same_card_as_old_as_it_is(home: Path) -> None:
    file, copy = home / "card.img", home / "copy.img"
    await filled(home, file)
    shutil.copy(file, copy)
    async with serving(home / "state", "--card", f"soft:{copy}", card=None) as gateway:
        assert "warm: 8 objects" in gateway.said_at("card")


async def test_a_card_of_another_host_is_adopted_by_name_or_served_as_it_is(home: Path) -> None:
    async with target(home / "card.img") as url:
        await command(home, "card", "format", url, "--state-dir", str(home / "state"))
        async with serving(home / "state", "--card", url, card=None) as gateway:
            await gateway.end()
        adopted = await command(home, "card", "adopt", url, "--yes", "--state-dir", str(home / "other"))
        assert adopted.code == ExitCode.OK
        assert "its owner was" in adopted.out
        assert json.loads((home / "other" / "host.json").read_text())["host_nqn"] in adopted.out
        async with serving(home / "other", "--card", url, card=None) as gateway:
            assert (await gateway.status())["card"]["state"] == "online"


async def test_a_namespace_that_grew_is_served_and_one_that_shrank_is_refused(home: Path) -> None:
    file = home / "card.img"
    url = await filled(home, file)
    resize(file, 2 * SIZE_BYTES)
    assert (await info(home, url))["card"]["grown_bytes"] == SIZE_BYTES
    async with serving(home / "state", "--card", url, card=None) as gateway:
        assert "warm: 8 objects" in gateway.said_at("card")
        await gateway.logged("has grown")
        assert await gateway.end() == ExitCode.OK
    resize(file, SIZE_BYTES // 2)
    await refused(home, url, "size_bytes", "Restore its size")
    assert "geometry_changed" in (await command(home, "card", "check", url)).out


async def test_a_soft_card_is_formatted_only_where_nothing_is_on_it(home: Path) -> None:
    file = home / "card.img"
    url = await filled(home, file)
    overwrite(file, 0, bytes(MIB))
    async with serving(home / "state", "--card", url, card=None) as gateway:
        assert "warm: 8 objects" in gateway.said_at("card")  # the other copy is at the other end
        await gateway.end()
    overwrite(file, 0, bytes(MIB))
    overwrite(file, SIZE_BYTES - MIB, b"\x01" + bytes(MIB - 1))
    await refused(home, url, "data on the card")
    overwrite(file, SIZE_BYTES - MIB, bytes(MIB))
    await refused(home, url, "data on the card")  # between the ends
    overwrite(file, 0, bytes(SIZE_BYTES - MIB))
    async with serving(home / "state", "--card", url, card=None) as gateway:
        assert "cold" in gateway.said_at("card")
        await gateway.logged("formatted a blank card")


async def test_a_card_that_is_zeroed_while_it_is_served_ends_the_gateway(home: Path) -> None:
    file = home / "card.img"
    async with serving(home / "state", "--card", f"soft:{file}?size=64MiB", card=None) as gateway:
        overwrite(file, 0, bytes(4096))
        assert await gateway.process.wait() == ExitCode.CARD_LOST
        await gateway.logged("zeroed")
        assert "Traceback" not in gateway.log_text
    assert not any(file.read_bytes()[:4096])  # it wrote nothing more


async def test_what_cannot_be_is_named(home: Path) -> None:
    file = home / "card.img"
    for arguments, code, words in (
        (("card", "info", f"soft:{file}"), ExitCode.CARD, "does not exist"),
        (("card", "check", f"soft:{file}?size=64MiB"), ExitCode.CARD, "does not exist"),
        (("card", "adopt", f"soft:{file}?size=64MiB"), ExitCode.CARD, "does not exist"),
        (
            ("card", "info", "nvme+tcp://127.0.0.1:1/nqn.2014-08.com.example:none"),
            ExitCode.CARD,
            "cannot use",
        ),
        (("card", "format", f"soft:{file}?size=64MiB", "--au", "3KiB"), ExitCode.CONFIG, "--au"),
        (("card", "format", f"soft:{file}?size=64MiB", "--objects", "0"), ExitCode.CONFIG, "--objects"),
        (("card", "format", f"soft:{file}?size=64MiB", "--au", "16MiB"), ExitCode.CARD, "card.au"),
    ):
        finished = await command(home, *arguments)
        assert finished.code == code, finished.err
        assert words in finished.err
        assert "Traceback" not in finished.err
    assert (
        await command(home, "card", "info", f"soft:{file}")
    ).code == ExitCode.OK  # the last one made the file
    assert (await info(home, f"soft:{file}"))["kind"] == "blank"
    assert (await command(home, "card", "adopt", f"soft:{file}", "--yes")).code == ExitCode.CARD


async def test_a_card_that_clients_may_still_write_to_is_not_cut_or_formatted_before_they_are_over(
    home: Path,
) -> None:
    """Also after a clean stop: the gateway is over, its clients are not."""
    file, waits = home / "card.img", "until the run before certainly cannot write any more"
    short = {
        "XKV_CONTROL__LIMITS__LEASE_MS": "1",
        "XKV_NVME__COMMAND_TIMEOUT_MS": "1000",
        "XKV_NVME__KEEP_ALIVE_MS": "1000",
    }
    direct = {**short, "XKV_CONTROL__DIRECT": "true", "XKV_CONTROL__DIRECT_GRACE_MS": "1000"}
    mine = ("--state-dir", str(home / "state"))

    async def waited(*words: str) -> bool:
        finished = await command(home, "card", *words, *mine, **short)
        assert finished.code == ExitCode.OK, finished.err
        return waits in finished.out + finished.err

    async with target(file) as url:
        assert not await waited("format", url)
        async with serving(home / "state", "--card", url, card=None, **direct) as gateway:
            assert await gateway.end() == ExitCode.OK
    resize(file, 128 * MIB)
    async with target(file, None) as url:
        assert await waited("adopt", url, "--yes")
        assert await waited("format", url, "--force")
        assert not await waited("format", url, "--force"), "nobody was given anything of this one"
