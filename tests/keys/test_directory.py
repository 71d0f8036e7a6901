"""The directory of keys: what counts, what is refused by name, and that nothing is overwritten or told."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
import zmq.auth
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.cli import main
from xkv_gateway.errors import ConfigError, ExitCode, KeyNameError
from xkv_gateway.keys.directory import KeyDirectory, check_namespaces, spelled_namespaces
from xkv_rpc.curve_files import CertificateError, read_certificate, read_client_keys
from xkv_rpc.doors import Grant

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    directory = KeyDirectory(tmp_path / "keys")
    directory.init()
    return directory


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_key_is_known_with_its_namespaces_and_its_file_is_all_a_client_needs(
    keys: KeyDirectory,
) -> None:
    path = keys.new("alice", frozenset({"", 'b,"=c'}))
    everything = keys.new("bob", None)
    client = read_client_keys(path)
    found = keys.read()
    assert not found.faults
    assert found.server.public == client.server_public
    assert found.grants[client.pair.public] == Grant("alice", frozenset({"", 'b,"=c'}))
    assert found.grants[read_client_keys(everything).pair.public].namespaces is None
    assert mode_of(path) == 0o600
    assert mode_of(keys.path / "server.key_secret") == 0o600
    assert mode_of(keys.path) == 0o700


def test_the_files_are_certificates_for_other_tools_too(keys: KeyDirectory) -> None:
    path = keys.new("alice", None)
    public, secret = zmq.auth.load_certificate(path)
    pair = read_client_keys(path).pair
    assert (public.decode(), (secret or b"").decode()) == (pair.public, pair.secret)
    zmq.auth.create_certificates(keys.path, "theirs")
    assert read_certificate(keys.path / "theirs.key").public
    # It does not say what it may touch, so it may touch nothing.
    (keys.path / "theirs.key_secret").chmod(0o600)
    grants, faults = keys.clients()
    assert [grant.name for grant in grants.values()] == ["alice"]
    assert len(faults) == 1
    assert "theirs.key" in faults[0]


def test_a_revoked_key_is_not_known_and_its_name_is_free_for_another_key(keys: KeyDirectory) -> None:
    first = read_client_keys(keys.new("alice", None)).pair.public
    before = keys.fingerprint()
    keys.revoke("alice")
    assert keys.fingerprint() != before
    assert not keys.read().grants
    assert read_client_keys(keys.new("alice", None)).pair.public != first


def test_nothing_is_ever_overwritten(keys: KeyDirectory) -> None:
    path = keys.new("alice", None)
    contents = {entry: entry.read_bytes() for entry in keys.path.iterdir()}
    with pytest.raises(KeyNameError, match="already"):
        keys.new("alice", None)
    with pytest.raises(ConfigError, match="already"):
        keys.init()
    assert {entry: entry.read_bytes() for entry in keys.path.iterdir()} == contents
    # Neither through a link that somebody has placed there.
    (keys.path / "bob.key_secret").symlink_to(path)
    with pytest.raises(KeyNameError):
        keys.new("bob", None)
    assert contents[path] == path.read_bytes()


@pytest.mark.parametrize(
    "name", ["", "server", ".", "..", "a/b", "../x", "a b", "-x", "x" * 65, "ä", "a\n", "a\0"]
)
def test_what_cannot_be_a_name_is_none(keys: KeyDirectory, name: str) -> None:
    for action in (lambda: keys.new(name, None), lambda: keys.revoke(name)):
        with pytest.raises(KeyNameError):
            action()


@pytest.mark.parametrize("file", ["server.key_secret", "alice.key_secret"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_secret_that_others_may_read_is_refused_by_name(keys: KeyDirectory, file: str, mode: int) -> None:
    keys.new("alice", None)
    (keys.path / file).chmod(mode)
    if file.startswith("server"):
        with pytest.raises(ConfigError, match=r"server\.key_secret"):
            keys.server_pair()
    assert any(file in fault and "0600" not in fault for fault in keys.clients()[1])


def test_a_key_or_a_directory_that_others_may_write_does_not_count(keys: KeyDirectory) -> None:
    keys.new("alice", None)
    (keys.path / "alice.key").chmod(0o666)
    grants, faults = keys.clients()
    assert not grants
    assert "alice.key" in faults[0]
    keys.path.chmod(0o770)
    with pytest.raises(PermissionError):
        keys.clients()


@pytest.mark.parametrize(
    "text",
    [
        "",
        'curve\n    public-key = "short"\n',
        "metadata\n    namespaces = *\n",
        'public-key = "x"\n',
        'curve\n    public-key = "%s"\n' % ("\x7f" * 40),
        "nonsense\n",
        "\0" * 100,
        "x" * 70_000,
        'metadata\n    namespaces = [1]\ncurve\n    public-key = "PUBLIC"\n',
        'metadata\n    namespaces = {}\ncurve\n    public-key = "PUBLIC"\n',
        'metadata\n    namespaces = ["\\u0000"]\ncurve\n    public-key = "PUBLIC"\n',
        'metadata\n    namespaces = *\n    namespaces = *\ncurve\n    public-key = "PUBLIC"\n',
    ],
)
def test_a_broken_certificate_is_named_and_the_others_count(keys: KeyDirectory, text: str) -> None:
    keys.new("alice", None)
    public = read_certificate(keys.path / "server.key").public
    (keys.path / "broken.key").write_text(text.replace("PUBLIC", public))
    grants, faults = keys.clients()
    assert [grant.name for grant in grants.values()] == ["alice"]
    assert len(faults) == 1
    assert "broken.key" in faults[0]


def test_two_names_of_one_key_are_a_fault(keys: KeyDirectory) -> None:
    keys.new("alice", None)
    (keys.path / "bob.key").write_bytes((keys.path / "alice.key").read_bytes())
    grants, faults = keys.clients()
    assert len(grants) == 1
    assert "has the key of alice" in faults[0]


def test_a_secret_that_is_not_of_its_public_key_is_refused(keys: KeyDirectory) -> None:
    path = keys.new("alice", None)
    other = read_client_keys(keys.new("bob", None)).pair
    text = path.read_text().replace(read_client_keys(path).pair.secret, other.secret)
    path.write_text(text)
    with pytest.raises(CertificateError, match="belong together") as caught:
        read_client_keys(path)
    assert other.secret not in str(caught.value)


def test_the_servers_pair_may_be_a_credential(keys: KeyDirectory, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (keys.path / "server.key_secret").rename(credentials / "server.key_secret")
    (credentials / "server.key_secret").chmod(0o440)
    with pytest.raises(ConfigError, match=r"server\.key_secret"):
        keys.server_pair()
    assert KeyDirectory(keys.path, credentials).read().server


PRINTABLE = st.characters(exclude_categories=("C", "Z")) | st.just(" ")


@given(
    st.sets(
        st.text(PRINTABLE, min_size=1, max_size=16).filter(lambda text: text != "_default"),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=50, derandomize=True, deadline=None)
def test_namespaces_survive_their_spelling(namespaces: set[str]) -> None:
    assert set(spelled_namespaces(Grant("x", check_namespaces(sorted(namespaces))))) == namespaces


def test_the_command_makes_lists_and_revokes_keys_and_says_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "keys"
    where = ["--keys", str(directory)]
    assert main(["keys", "list", *where]) == ExitCode.CONFIG
    assert main(["keys", "new", "alice", *where]) == ExitCode.CONFIG
    assert main(["keys", "init", *where]) == ExitCode.OK
    assert (
        main(["keys", "new", "alice", "--namespace", "a", "--namespace", "_default", *where]) == ExitCode.OK
    )
    assert main(["keys", "new", "bob", *where]) == ExitCode.OK
    capsys.readouterr()
    assert main(["keys", "list", *where]) == ExitCode.OK
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["name", "alice", "bob"]
    assert "_default, a" in listed[1]
    assert main(["keys", "revoke", "bob", *where]) == ExitCode.OK
    assert main(["keys", "revoke", "bob", *where]) == ExitCode.CONFIG
    assert main(["keys", "new", "x", "--namespace", "y" * 65, *where]) == ExitCode.CONFIG
    audit = (directory / "audit.log").read_text()
    assert mode_of(directory / "audit.log") == 0o600
    assert [line.split()[1:3] for line in audit.splitlines()] == [
        ["init", "server"],
        ["new", "alice,"],
        ["new", "bob,"],
        ["revoke", "bob"],
    ]
    assert f"uid {os.getuid()}" in audit
    secrets = [read_certificate(path).secret for path in directory.glob("*.key_secret")]
    captured = capsys.readouterr()
    for secret in secrets:
        assert secret
        assert secret not in captured.out + captured.err + audit + "\n".join(listed)
