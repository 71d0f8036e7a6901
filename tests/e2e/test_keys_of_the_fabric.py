"""A card that asks who a gateway is, and a gateway that asks the same of the card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.commands import command
from tests.e2e.gateway import run, serving
from tests.e2e.target import target
from xkv_gateway.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

SHORT = {"XKV_NVME__KEEP_ALIVE_MS": "2000"}


async def new_key(home: Path, name: str) -> Path:
    """A fresh key in a file that nobody else can read."""
    made = await command(home, "fabric", "new-key")
    assert made.code == ExitCode.OK, made.err
    path = home / name
    path.touch(0o600)
    path.write_text(made.out)
    return path


def settings_of(host: Path, card: Path) -> dict[str, str]:
    return {
        **SHORT,
        "XKV_FABRIC__DHCHAP_KEY_FILE": str(host),
        "XKV_FABRIC__DHCHAP_CTRL_KEY_FILE": str(card),
    }


async def test_both_prove_themselves_and_a_wrong_key_ends_the_start_with_whose_it_is(home: Path) -> None:
    host, card, other = [await new_key(home, name) for name in ("host.key", "card.key", "other.key")]
    keys = ("--dhchap-key-file", str(host), "--dhchap-ctrl-key-file", str(card))
    async with target(home / "card.img", arguments=keys) as url:
        right = settings_of(host, card)
        formatted = await command(home, "card", "format", url, "--state-dir", str(home / "op"), **right)
        assert formatted.code == ExitCode.OK, formatted.err
        async with serving(home / "state", "--card", url, card=None, **right) as gateway:
            status = (await gateway.status())["card"]
            assert status["state"] == "online"
            assert status["connection"]["authenticated"] == {
                "hash": "SHA-512",
                "group": "FFDHE8192",
                "both_ways": True,
            }
            shown = (await run(home, "status", "--admin", gateway.admin)).out
            assert "authenticated by DH-HMAC-CHAP (SHA-512, FFDHE8192, both ways)" in " ".join(shown.split())
            log = gateway.log_text + str(status) + shown
        wrong = await _refused(home, url, settings_of(other, card))
        assert "does not accept this host's key" in wrong
        assert "Are the keys of [fabric] those that the target has" in wrong
        impostor = await _refused(home, url, settings_of(host, other))
        assert "does not prove that it knows the controller key" in impostor
        missing = await _refused(home, url, SHORT)
        assert "this host has no key" in missing
        for key in (host, card, other):
            secret = key.read_text()[10:40]
            assert not any(secret in text for text in (log, wrong, impostor, missing))


async def _refused(home: Path, url: str, settings: dict[str, str]) -> str:
    done = await run(home, "serve", "--state-dir", str(home / "other"), "--card", url, *PORTS, **settings)
    assert done.code == ExitCode.CARD, done.err
    return done.out + done.err


PORTS = ("--port", "0", "--admin-port", "0")


@pytest.mark.parametrize("mode", [0o640, 0o604])
async def test_a_key_that_others_can_read_ends_the_start(home: Path, mode: int) -> None:
    key = await new_key(home, "host.key")
    key.chmod(mode)
    settings = {"XKV_FABRIC__DHCHAP_KEY_FILE": str(key)}
    done = await run(home, "serve", "--state-dir", str(home / "state"), *PORTS, **settings)
    assert done.code == ExitCode.CONFIG
    assert str(key) in done.err
