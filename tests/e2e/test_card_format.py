from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.commands import command
from tests.e2e.gateway import run, serve_arguments, serving
from tests.e2e.target import target
from xkv_gateway.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_blank_namespace_is_served_once_it_was_formatted_and_never_formatted_twice_by_accident(
    home: Path,
) -> None:
    state = home / "state"
    async with target(home / "target.img") as url:
        refused = await run(home, *serve_arguments(state, None), "--card", url)
        assert refused.code == ExitCode.CARD
        assert "card format" in refused.err
        formatted = await command(home, "card", "format", url, "--label", "one", "--state-dir", str(state))
        assert (formatted.code, formatted.err) == (ExitCode.OK, "")
        assert url in formatted.out
        async with serving(state, "--card", url, card=None) as gateway:
            client = gateway.client()
            assert await client.store("", b"", [b"key"], [b"bytes"]) == ["stored"]
            await client.aclose()
            in_use = await command(home, "card", "format", url, "--force", "--state-dir", str(home / "other"))
            assert in_use.code == ExitCode.CARD
            assert "lives" in in_use.err
            assert await gateway.end() == ExitCode.OK
        again = await command(home, "card", "format", url, "--state-dir", str(state))
        assert again.code == ExitCode.CARD
        assert "the card 'one'" in again.err
        assert "1 objects" in again.err
        assert "--force" in again.err
        async with serving(state, "--card", url, card=None) as gateway:
            assert "warm" in gateway.said_at("card")
        forced = await command(home, "card", "format", url, "--force", "--state-dir", str(state))
        assert forced.code == ExitCode.OK
        async with serving(state, "--card", url, card=None) as gateway:
            assert "cold" in gateway.said_at("card")


async def test_somebody_elses_data_is_left_alone_without_force(home: Path) -> None:
    file = home / "card.img"
    async with target(file):
        pass
    with file.open("r+b") as stream:
        stream.write(b"somebody's partition table")
    url = f"soft:{file}"
    for arguments in (("card", "format", url), (*serve_arguments(home / "state", None), "--card", url)):
        refused = await run(home, *arguments)
        assert refused.code == ExitCode.CARD
        assert "somebody else" in refused.err
    with file.open("r+b") as stream:
        stream.seek(1080)
        stream.write(b"\x53\xef")
    assert "an ext2/ext3/ext4 file system" in (await command(home, "card", "format", url)).err
    assert file.read_bytes()[:26] == b"somebody's partition table"
    assert (await command(home, "card", "format", url, "--force")).code == ExitCode.OK


async def test_a_wrong_card_or_label_is_named(home: Path) -> None:
    assert (await command(home, "card", "format", "soft:")).code == ExitCode.CONFIG
    assert (await command(home, "card", "format", f"soft:{home}/none.img")).code == ExitCode.CARD
    label = await command(home, "card", "format", f"soft:{home}/x?size=1GiB", "--label", "x" * 65)
    assert (label.code, "--label" in label.err) == (ExitCode.CONFIG, True)
