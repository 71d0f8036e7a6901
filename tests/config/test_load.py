from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.config import Config, load_config, sample_text
from xkv_gateway.config.sample import effective_values
from xkv_gateway.config.tree import SETTINGS, VARIABLES
from xkv_gateway.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from pathlib import Path

    from xkv_gateway.config import Loaded


def load_text(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> Loaded:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return load_config(file=path, environment=environment or {}, flags={})


def test_without_any_source_everything_is_the_default() -> None:
    loaded = load_config(file=None, environment={"PATH": "/bin"}, flags={})
    assert loaded.config == Config()
    assert loaded.sources == {}


def test_the_sample_parses_to_the_defaults(tmp_path: Path) -> None:
    assert load_text(tmp_path, sample_text()).config == Config()


def test_the_sample_names_every_key_and_every_example_is_valid(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", sample_text(), flags=re.MULTILINE)
    named = {
        path for path in SETTINGS for table in [tomllib.loads(text)] if path[-1] in _table(table, path[:-1])
    }
    assert named == set(SETTINGS)
    assert set(load_text(tmp_path, text).sources) == set(SETTINGS)


def _table(table: dict[str, object], path: tuple[str, ...]) -> dict[str, object]:
    for name in path:
        inner = table[name]
        assert isinstance(inner, dict)
        table = inner
    return table


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("[control]\nport = 1\n[admin]\nport = 2\n[log]\nlevel = 'debug'\n")
    loaded = load_config(
        file=path,
        environment={"XKV_CONTROL__PORT": "11", "XKV_ADMIN__PORT": "12"},
        flags={("control", "port"): ("--port", "21")},
    )
    assert (loaded.config.control.port, loaded.config.admin.port, loaded.config.log.level) == (
        21,
        12,
        "debug",
    )
    sources = {key: source for key, _, source in effective_values(loaded)}
    assert sources["control.port"] == "flag --port"
    assert sources["admin.port"] == "environment variable XKV_ADMIN__PORT"
    assert sources["log.level"] == f"file {path}"
    assert sources["card.au"] == "default"


def test_the_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text("[control]\nport = 7\n")
    loaded = load_config(file=None, environment={"XKV_CONFIG": str(path)}, flags={})
    assert loaded.config.control.port == 7


def test_every_setting_has_a_variable_of_its_own() -> None:
    assert len(VARIABLES) == len(SETTINGS)
    assert VARIABLES["XKV_CONTROL__PORT"].path == ("control", "port")
    assert VARIABLES["XKV_STATE_DIR"].path == ("state_dir",)
    assert VARIABLES["XKV_CONTROL__LIMITS__LEASE_MS"].path == ("control", "limits", "lease_ms")


def test_sizes_are_read_with_units_from_file_and_environment(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "[card]\nau = '128KiB'\n", {"XKV_CONTROL__LIMITS__OBJECT_BYTES": "1MiB"})
    assert loaded.config.card.au == 128 << 10
    assert loaded.config.control.limits.object_bytes == 1 << 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[control]\nport = '5'", ["control.port", "whole number"]),
        ("[control]\nport = true", ["control.port", "whole number"]),
        ("[control]\nport = 1.0", ["control.port", "whole number"]),
        ("[control]\nport = 70000", ["control.port", "70000", "at most 65535"]),
        ("[control]\nport = -1", ["control.port", "at least 0"]),
        ("[control]\nprot = 1", ["control.prot", "did you mean control.port"]),
        ("[controll]\nport = 1", ["unknown key controll"]),
        ("control = 3", ["control", "table"]),
        ("[control]\nallow_unauthenticated = 'yes'", ["control.allow_unauthenticated", "true or false"]),
        ("[control]\nallow_unauthenticated = 1", ["control.allow_unauthenticated", "true or false"]),
        ("[control]\nbind_address = ''", ["control.bind_address", "address"]),
        ("[control]\nsocket = 5", ["control.socket", "text"]),
        ("[card]\nau = 5000", ["card.au", "power of two"]),
        ("[card]\nau = '5 XB'", ["card.au", "not a size"]),
        ("[card]\nurl = 'kernel+tcp://a'", ["card.url", "NQN"]),
        ("[card]\nurl = 'soft:x?size=1'", ["card.url", "size"]),
        ("[card]\ndurability = 'some'", ["card.durability", "'power' or 'process'"]),
        ("[card]\nmax_objects = 0", ["card.max_objects", "at least 1"]),
        ("[eviction]\ntrigger_watermark = 1.01", ["eviction.trigger_watermark"]),
        ("[eviction]\neviction_ratio = nan", ["eviction.eviction_ratio"]),
        ("[eviction]\ntrigger_watermark = inf", ["eviction.trigger_watermark"]),
        ("[eviction]\npolicy = 'lru'", ["eviction.policy", "IsolatedLRU"]),
        ("[eviction]\nenforcement = 'firm'", ["eviction.enforcement"]),
        ("[eviction]\ninterval_s = 0", ["eviction.interval_s"]),
        ("[eviction]\nunregistered_limit = -1", ["eviction.unregistered_limit"]),
        ("[eviction]\nhigh_watermark = 0.9", ["eviction.high_watermark"]),
        ("[nvme]\nhost_nqn = 'nqn.2014-08.com.example:a'", ["nvme.host_id", "both or none"]),
        ("[nvme]\nhost_id = '6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e'", ["nvme.host_nqn", "both or none"]),
        ("[nvme]\nhost_id = '00000000-0000-0000-0000-000000000000'", ["nvme.host_id", "all zero"]),
        ("[nvme]\nhost_id = 'me'", ["nvme.host_id", "UUID"]),
        ("[nvme]\nhost_nqn = ''", ["nvme.host_nqn", "1 to 223"]),
        (f"[nvme]\nhost_nqn = '{'n' * 224}'", ["nvme.host_nqn", "1 to 223"]),
        ("[nvme]\nhost_nqn = 'nqn.2014 08'", ["nvme.host_nqn", "without a space"]),
        ("[nvme]\nhost_nqn = 'gateway-7'", ["nvme.host_nqn", "must be an NQN"]),
        ("[nvme]\nhost_nqn = 'nqn.2014-13.com.example:a'", ["nvme.host_nqn", "must be an NQN"]),
        ("[nvme]\nhost_nqn = 'nqn.2014-08.org.nvmexpress.discovery'", ["nvme.host_nqn", "name of a host"]),
        ("[log]\nlevel = 'loud'", ["log.level", "'debug'"]),
        ("state_dir = ''", ["state_dir", "empty"]),
        ("port = = 5", ["not valid TOML"]),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_key_and_the_file(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    message = str(caught.value)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "\n" not in message
    assert str(tmp_path / "gateway.toml") in message
    assert "pydantic" not in message.lower()
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("XKV_CONTROL__PORT", "x", ["control.port", "whole number"]),
        ("XKV_CONTROL__ALLOW_UNAUTHENTICATED", "maybe", ["true or false"]),
        ("XKV_CARD__AU", "", ["card.au", "not a size"]),
        ("XKV_CONTROL", "{}", ["unknown environment variable"]),
        ("XKV_CONTROL__PROT", "1", ["did you mean XKV_CONTROL__PORT"]),
        ("XKV_control__port", "1", ["unknown environment variable"]),
        ("XKV_CONFIG", "/nonexistent/gateway.toml", ["/nonexistent/gateway.toml", "No such file"]),
    ],
)
def test_a_bad_variable_is_named(variable: str, value: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file=None, environment={variable: value}, flags={})
    for word in (variable, *words) if variable != "XKV_CONFIG" else words:
        assert word in str(caught.value)


def test_variables_of_tests_and_benchmarks_are_let_through() -> None:
    others = ("XKV_SPDK_TGT", "XKV_VLLM_VENV", "XKV_FRONTEND_DEPLOYMENT", "XKV_FRONTEND_VERIFY_KEY_A")
    load_config(file=None, environment=dict.fromkeys(others, "/x"), flags={})


def test_a_bad_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"control\.port = 'x' \(flag --port\): must be a whole number"):
        load_config(file=None, environment={}, flags={("control", "port"): ("--port", "x")})


@pytest.mark.parametrize("content", [b"\xff\xfe", b"# " + b"x" * (1 << 20)])
def test_a_file_that_is_no_text_or_far_too_large_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gateway.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"gateway\.toml"):
        load_config(file=path, environment={}, flags={})


def test_lists_stand_in_files_as_lists_and_in_variables_between_commas(tmp_path: Path) -> None:
    networks = ("10.20.0.0/24", "fd00:20::/64")
    loaded = load_text(tmp_path, '[fabric]\nnetworks = ["10.20.0.0/24", "fd00:20::/64"]\n')
    assert loaded.config.fabric.networks == networks
    loaded = load_config(
        file=None, environment={"XKV_FABRIC__NETWORKS": "10.20.0.0/24, fd00:20::/64"}, flags={}
    )
    assert loaded.config.fabric.networks == networks
    shown = {key: value for key, value, _ in effective_values(loaded)}
    assert shown["fabric.networks"] == '["10.20.0.0/24", "fd00:20::/64"]'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("networks = 7", "must be a list"),
        ('networks = ["10.20.0.1/24"]', "10.20.0.1/24"),
        ('networks = ["storage"]', "'storage' is no network"),
        ('dhchap_key_file = "DHHC-1:00:c2VjcmV0:"', "not the key itself"),
        ('dhchap_key_file = "keys/host.key"', "absolute path"),
        ('dhchap_ctrl_key_file = "target.key"', "needs fabric.dhchap_key_file"),
    ],
)
def test_a_wrong_fabric_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"fabric\.") as caught:
        load_text(tmp_path, f"[fabric]\n{text}\n")
    assert reason in str(caught.value)
    assert "c2VjcmV0" not in str(caught.value)


def test_the_hosts_of_a_target_are_tables_in_files_and_json_in_variables(tmp_path: Path) -> None:
    text = '[target]\nhosts = [{ nqn = "nqn.2014-08.com.example:a", dhchap_key_file = "/k" }]\n'
    loaded = load_text(tmp_path, text)
    assert loaded.config.target.hosts[0].dhchap_key_file == "/k"
    shown = {key: value for key, value, _ in effective_values(loaded)}["target.hosts"]
    assert load_text(tmp_path, f"[target]\nhosts = {shown}\n").config == loaded.config
    variable = '[{"nqn": "nqn.2014-08.com.example:a", "dhchap_key_file": "/k"}]'
    loaded_too = load_config(file=None, environment={"XKV_TARGET__HOSTS": variable}, flags={})
    assert loaded_too.config == loaded.config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('hosts = ["nqn.2014-08.com.example:a"]', "[0]: must be a table"),
        ('hosts = [{ nqn = "nqn.2014-08.x:a", key = "/k" }]', "[0].key: is not known here"),
        ('hosts = [{ nqn = "nqn.2014-08.x:a", dhchap_ctrl_key_file = "/k" }]', "needs dhchap_key_file"),
        ('hosts = [{ nqn = "a b" }]', "without a space"),
        ("hosts = [{}]", "[0].nqn: is missing"),
        ('listeners = ["0.0.0.0:4420"]', "never on all"),
        ('listeners = ["target.example:4420"]', "not a name"),
        ('listeners = ["10.20.0.5:0"]', "an IP address and a port"),
        ('rpc = "spdk.sock"', "absolute path"),
        ('rpc = "tcp://10.20.0.5"', "an IP address and a port"),
        ('serial = "twenty-one characters"', "without a space"),
        ('lvol.name = "card"', "must begin with 'xkv-'"),
        ('bdev.pci = "5e:00.0"', "0000:5e:00.0"),
        ('transport.max_io_size = "1000000"', "power of two"),
    ],
)
def test_a_wrong_target_is_refused_by_name(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"target\.") as caught:
        load_text(tmp_path, f"[target]\n{text}\n")
    assert reason in str(caught.value)
