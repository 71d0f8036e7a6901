"""What an operator types: the policy file, secrets, keys, and the commands around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.frontend.harness import ACME, SECRET
from xkv_frontend.cli import cli, main
from xkv_frontend.core.keys import parse_keys
from xkv_frontend.core.names import Scope
from xkv_frontend.core.policy import Policy, UnknownFields
from xkv_frontend.core.routes import RouteName
from xkv_frontend.errors import ConfigError, ExitCode
from xkv_frontend.files import load_secret
from xkv_frontend.policyfile import load_policy, parse_policy
from xkv_frontend.settings import FrontSettings, build_authenticator, stated_version
from xkv_frontend.upstream import UpstreamOptions, parse_upstream

if TYPE_CHECKING:
    from pathlib import Path

POLICY = """
unknown_fields = "drop"
body_bytes_max = 1048576

[default]
scope = "user"
requests_per_s = 5.5

[tenants.acme]
scope = "none"
store = false
media_hosts = ["Media.Example.org"]
concurrency = 7

[tenants."beta.example"]

[routes.chat]
scope = "session"

[routes.pooling]
enabled = false
"""


def test_a_policy_file_says_it_all() -> None:
    policy = parse_policy(POLICY)
    acme = policy.tenant(ACME)
    assert (acme.scope, acme.store, acme.concurrency, acme.requests_per_s) == (Scope.NONE, False, 7, 5.5)
    assert acme.media_hosts == {"media.example.org"}
    assert policy.default.scope is Scope.USER
    assert policy.unknown_fields is UnknownFields.DROP
    assert policy.routes[RouteName.CHAT].scope is Scope.SESSION
    assert policy.routes_off == {RouteName.POOLING}
    assert load_policy(None) == Policy()


@pytest.mark.parametrize(
    ("text", "named"),
    [("scope = 1", "scope"), ("[default]\nscop = 'user'", "default.scop"), ("[default]\nscope = 'world'", "default.scope"),
     ("[tenants.'a|b']", "tenants"), ("[tenants._default]", "tenants"), ("[routes.metrics]", "routes.metrics"),
     ("[default]\nconcurrency = 0", "concurrency"), ("[default]\nstore = 'no'", "default.store"),
     ("[default]\nrequests_per_s = nan", "requests_per_s"), ("[default]\nmedia_hosts = ['http://x/']", "media_hosts"),
     ("not toml", "policy file"), ("body_bytes_max = 1", "body_bytes_max")],
)  # fmt: skip
def test_a_wrong_policy_names_the_key(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_policy(text)


# --- the secret -----------------------------------------------------------------------------------------------------


def test_a_secret_comes_from_a_private_file_the_credential_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET.hex())
    path.chmod(0o600)
    same = load_secret(path, {}).digest(b"")
    assert load_secret(None, {"CACHE_SALT_SECRET": SECRET.hex()}).digest(b"") == same
    credential = tmp_path / "cache-salt-secret"
    credential.write_bytes(SECRET)
    credential.chmod(0o400)
    assert (
        load_secret(None, {"CREDENTIALS_DIRECTORY": str(tmp_path), "CACHE_SALT_SECRET": "x"}).digest(b"")
        == same
    )
    path.chmod(0o640)
    assert load_secret(path, {}), "a group may read it"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666])
def test_a_secret_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET.hex())
    path.chmod(mode)
    with pytest.raises(ConfigError, match="lets others") as caught:
        load_secret(path, {})
    assert SECRET.hex() not in str(caught.value) + caught.value.advice


@pytest.mark.parametrize(
    ("content", "environment"),
    [(None, {}), (None, {"CACHE_SALT_SECRET": ""}), (None, {"CACHE_SALT_SECRET": "00" * 31}), (None, {"CACHE_SALT_SECRET": "xy" * 40}),
     (None, {"CACHE_SALT_SECRET": "00" * 32}), (b"", {}), (b"short", {}), (b"changeme" * 8, {}), (b"0" * 70000, {})],
)  # fmt: skip
def test_without_a_good_secret_nothing_starts(
    tmp_path: Path, content: bytes | None, environment: dict[str, str]
) -> None:
    path = None
    if content is not None:
        path = tmp_path / "secret"
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError):
        load_secret(path, environment)


def test_a_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises(ConfigError):
            load_secret(path, {"CACHE_SALT_SECRET": SECRET.hex()})


# --- the commands ---------------------------------------------------------------------------------------------------


def run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(cli, list(arguments), input=stdin, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_secret_new_writes_a_private_file_and_rotating_says_what_it_costs(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    shown = run("secret", "new", str(path))
    first = path.read_text().strip()
    assert (path.stat().st_mode & 0o777, len(first)) == (0o600, 64)
    assert first not in shown
    with pytest.raises(ConfigError, match="exists") as caught:
        run("secret", "new", str(path))
    assert "empty" in caught.value.advice
    assert "cache is empty for all" in run("secret", "new", str(path), "--rotate")
    assert path.read_text().strip() != first


def test_salt_prints_the_tag_and_the_salt_only_when_asked(tmp_path: Path) -> None:
    env = {"CACHE_SALT_SECRET": SECRET.hex()}
    assert run("salt", "acme", "--deployment", "prod", env=env) == "32a2f15b58e32fc0fc691c82a6fbb54f\n"
    revealed = run("salt", "acme", "--deployment", "prod", "--reveal", env=env)
    assert revealed == "-e-E44q1cFy6AnPDukBHaNvoPQh1m_w-Z9dC7NIn2E4\n"
    tags = {
        run("salt", "acme", "--deployment", "prod", *more, env=env)
        for more in ([], ["--user", "u"], ["--session", "s"])
    }
    assert len(tags) == 3
    for wrong in (
        ["a|b", "--deployment", "prod"],
        ["acme", "--deployment", "a|b"],
        ["acme", "--deployment", "p", "--user", "a|b"],
    ):
        with pytest.raises(ConfigError):
            run("salt", *wrong, env=env)


def test_keys_are_added_listed_and_revoked(tmp_path: Path) -> None:
    path = str(tmp_path / "keys")
    key = run("keys", "add", "acme", "--keys-file", path).strip()
    run(
        "keys",
        "add",
        "acme",
        "--keys-file",
        path,
        "--user",
        "alice",
        "--stdin",
        stdin="a-key-of-my-own-0123456789\n",
    )
    keys = parse_keys((tmp_path / "keys").read_text())
    assert key not in (tmp_path / "keys").read_text()
    assert keys.table()[keys.digest(key.encode())].tenant == "acme"
    listed = run("keys", "list", "--keys-file", path)
    assert listed.count("active") == 2
    assert "alice" in listed
    identifier = listed.split()[0]
    (tmp_path / "keys").chmod(0o644)
    run("keys", "revoke", identifier, "--keys-file", path)
    assert "revoked" in run("keys", "list", "--keys-file", path)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o644
    for wrong in (
        ["add", "a|b"],
        ["add", "acme", "--user", "two words"],
        ["revoke", "nobody"],
        ["add", "acme", "--stdin"],
    ):
        with pytest.raises(ConfigError):
            run("keys", *wrong, "--keys-file", path, stdin="short\n")


def test_there_is_no_way_to_put_the_secret_on_the_command_line() -> None:
    for command in ("serve", "salt", "secret"):
        assert main([command, "--secret", SECRET.hex()]) == ExitCode.CONFIG


def test_every_command_explains_itself() -> None:
    for command in ("serve", "secret", "salt", "keys", "verify", "timing"):
        assert "Options:" in run(command, "--help")


@pytest.mark.parametrize(
    ("url", "parsed"),
    [("http://127.0.0.1:8000", (b"http", b"127.0.0.1", 8000)), ("https://vllm.example/", (b"https", b"vllm.example", 443)),
     ("http://[::1]:8000", (b"http", b"::1", 8000)), *((wrong, None) for wrong in (
        "127.0.0.1:8000", "ftp://x", "http://", "http://x/path", "http://u:p@x", "http://x?q", "http://x:99999", "unix:///x"))],
)  # fmt: skip
def test_the_upstream_is_a_plain_address(url: str, parsed: tuple[bytes, bytes, int] | None) -> None:
    if parsed is None:
        with pytest.raises(ConfigError):
            parse_upstream(url)
    else:
        assert parse_upstream(url) == parsed


def test_settings_show_no_key_of_the_upstream() -> None:
    options = UpstreamOptions(b"http", b"::1", 8000, b"Bearer marked")
    assert "marked" not in repr(options)
    assert options.host_header == b"[::1]:8000"


def test_exactly_one_way_of_authentication_is_needed(tmp_path: Path) -> None:
    for settings in (
        FrontSettings("prod"),
        FrontSettings("prod", keys_file=tmp_path / "k", auth_hook="os:getcwd"),
        FrontSettings("prod", trusted_header="X-Tenant"),
        FrontSettings("prod", trusted_header="X Tenant", trusted_peers=("::1",)),
        FrontSettings("prod", keys_file=tmp_path / "missing"),
    ):
        with pytest.raises(ConfigError):
            build_authenticator(settings)
    assert build_authenticator(FrontSettings("prod", trusted_header="X-Tenant", trusted_peers=("::1",)))
    assert build_authenticator(FrontSettings("prod", auth_hook="os.path:join"))


def test_settings_of_the_middleware_come_from_the_environment() -> None:
    settings = FrontSettings.from_environment(
        {
            "XKV_FRONTEND_DEPLOYMENT": "prod",
            "XKV_FRONTEND_KEYS_FILE": "/k",
            "XKV_FRONTEND_VLLM_VERSION": "0.32.0",
            "HOME": "/x",
        }
    )
    assert (settings.deployment, str(settings.keys_file), settings.vllm_version) == ("prod", "/k", (0, 32))
    for wrong in ({}, {"XKV_FRONTEND_DEPLOYMENT": "p", "XKV_FRONTEND_KEY_FILE": "/k"}):
        with pytest.raises(ConfigError):
            FrontSettings.from_environment(wrong)
    for version in ("0.8.0", "new"):
        with pytest.raises(ConfigError):
            stated_version(version)


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    arguments = ["serve", "--upstream", "http://127.0.0.1:1", "--deployment", "prod", "--port", "0"]
    environment = {"PATH": os.environ["PATH"], "CACHE_SALT_SECRET": "00"}
    done = subprocess.run(
        [sys.executable, "-m", "xkv_frontend", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith("xkv-frontend: the variable CACHE_SALT_SECRET: ")
    assert len(done.stderr.splitlines()) == 2
    assert json.dumps(done.stdout) == '""'
