"""What changes in the directory of keys is known to the doorkeeper well within a second, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.errors import ConfigError
from xkv_gateway.keys.directory import KeyDirectory
from xkv_gateway.keys.watch import KeyWatch
from xkv_rpc.curve_files import read_client_keys
from xkv_rpc.doors import Doorkeeper

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

HANG_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    directory = KeyDirectory(tmp_path / "keys")
    directory.init()
    return directory


@pytest.fixture
async def doorkeeper(keys: KeyDirectory) -> AsyncIterator[Doorkeeper]:
    doorkeeper = Doorkeeper()
    watch = KeyWatch(keys, doorkeeper)
    watch.begin()
    watch.start()
    yield doorkeeper
    await watch.aclose()


async def test_new_revoked_and_changed_keys_are_noticed(
    keys: KeyDirectory, doorkeeper: Doorkeeper, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    public = read_client_keys(keys.new("alice", frozenset({"a"}))).pair.public
    await until(lambda: doorkeeper.grant_of(public) is not None)
    text = (keys.path / "alice.key").read_text()
    (keys.path / "alice.key").write_text(text.replace('["a"]', '["b", "c"]'))
    await until(lambda: (grant := doorkeeper.grant_of(public)) is not None and grant.covers("c"))
    keys.revoke("alice")
    await until(lambda: doorkeeper.grant_of(public) is None)
    said = [record.getMessage() for record in caplog.records if record.name == "xkv_gateway.audit"]
    assert said == [
        "key alice is in, for namespaces a",
        "key alice is in, for namespaces b, c",
        "key alice is out",
    ]


async def test_while_the_directory_cannot_be_read_nobody_is_known(
    keys: KeyDirectory, doorkeeper: Doorkeeper, caplog: pytest.LogCaptureFixture
) -> None:
    public = read_client_keys(keys.new("alice", None)).pair.public
    await until(lambda: doorkeeper.grant_of(public) is not None)
    keys.path.rename(keys.path.with_name("away"))
    await until(lambda: doorkeeper.grant_of(public) is None)
    keys.path.with_name("away").rename(keys.path)
    await until(lambda: doorkeeper.grant_of(public) is not None)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1


async def test_a_key_that_others_may_change_is_out_while_it_is_so(
    keys: KeyDirectory, doorkeeper: Doorkeeper
) -> None:
    public = read_client_keys(keys.new("alice", None)).pair.public
    await until(lambda: doorkeeper.grant_of(public) is not None)
    (keys.path / "alice.key").chmod(0o666)
    await until(lambda: doorkeeper.grant_of(public) is None)


async def test_nothing_begins_with_half_a_set_of_keys(keys: KeyDirectory, tmp_path: Path) -> None:
    keys.new("alice", None)
    (keys.path / "alice.key_secret").chmod(0o644)
    doorkeeper = Doorkeeper()
    with pytest.raises(ConfigError, match=r"alice\.key_secret"):
        KeyWatch(keys, doorkeeper).begin()
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyWatch(KeyDirectory(tmp_path / "none"), doorkeeper).begin()
    (keys.path / "server.key_secret").unlink()
    with pytest.raises(ConfigError):
        KeyWatch(keys, doorkeeper).begin()


async def test_if_the_watch_fails_nobody_is_let_in_by_keys_that_nobody_watches(
    keys: KeyDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(KeyDirectory):
        broken = False

        def fingerprint(self) -> tuple[tuple[str, int, int, int, int], ...]:
            if self.broken:
                raise RuntimeError
            return super().fingerprint()

    public = read_client_keys(keys.new("alice", None)).pair.public
    directory, doorkeeper = Broken(keys.path), Doorkeeper()
    watch = KeyWatch(directory, doorkeeper)
    watch.begin()
    watch.start()
    assert doorkeeper.grant_of(public) is not None
    directory.broken = True
    watch.look()
    await until(lambda: doorkeeper.grant_of(public) is None)
    assert "not watched any more" in caplog.text
    await watch.aclose()
