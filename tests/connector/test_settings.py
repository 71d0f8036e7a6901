"""Every setting has a default; what cannot be used is refused by name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from xkv_vllm_connector.settings import Settings, SettingsError, parse_settings


def test_nothing_given_is_all_defaults() -> None:
    assert parse_settings(None) == parse_settings({}) == Settings()
    defaults = Settings()
    assert (defaults.xkv_gateway_port, defaults.chunk_size, defaults.key_namespace) == (5557, 128, "")
    assert defaults.endpoint == "tcp://127.0.0.1:5557"


def test_the_documented_settings_are_taken() -> None:
    given = {
        "xkv_gateway_port": 5557,
        "chunk_size": 128,
        "require_cache_salt": True,
        "key_namespace": "prod-glm53",
    }
    settings = parse_settings(given)
    assert settings.require_cache_salt
    assert settings.key_namespace == "prod-glm53"


def test_the_address_is_a_port_of_a_host_or_a_socket() -> None:
    assert parse_settings({"xkv_gateway_host": "10.0.0.1"}).endpoint == "tcp://10.0.0.1:5557"
    assert parse_settings({"xkv_gateway_host": "::1", "xkv_gateway_port": 1}).endpoint == "tcp://[::1]:1"
    assert parse_settings({"xkv_gateway_host": "fe80::1%eth0"}).endpoint == "tcp://[fe80::1%eth0]:5557"
    assert parse_settings({"xkv_gateway_socket": "/run/x.sock"}).endpoint == "ipc:///run/x.sock"


@pytest.mark.parametrize("field", fields(Settings), ids=lambda field: field.name)
def test_a_value_of_another_type_is_refused_by_name(field: object) -> None:
    name = field.name  # type: ignore[attr-defined]
    wanted = type(getattr(Settings(), name))
    for value in (None, [], {}, 1.5, "text", 7, True):
        if type(value) is not wanted:
            with pytest.raises(SettingsError) as caught:
                parse_settings({name: value})
            assert caught.value.field == name
            assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("xkv_gateway_port", 0),
        ("xkv_gateway_port", 65_536),
        ("xkv_gateway_host", ""),
        ("xkv_gateway_host", "a b"),
        ("xkv_gateway_host", "http://a"),
        ("xkv_gateway_host", "localhost:5557"),
        ("xkv_gateway_host", "[::1]"),
        ("xkv_gateway_host", "::1]:5557"),
        ("xkv_gateway_host", "a\nb"),
        ("xkv_gateway_host", "a\0"),
        ("xkv_gateway_host", "\ud800"),
        ("xkv_gateway_socket", "/run/" + "x" * 107),
        ("xkv_gateway_socket", "/run/a\0b"),
        ("xkv_gateway_socket", "@abstract"),
        ("xkv_gateway_socket", "/run/\ud800"),
        ("xkv_keys", "a\0b"),
        ("xkv_keys", "\ud800"),
        ("chunk_size", 0),
        ("chunk_size", -1),
        ("key_namespace", "_default"),
        ("key_namespace", "x" * 65),
        ("key_namespace", "ü" * 33),
        ("key_namespace", "\ud800"),
        ("load_mode", "later"),
        ("lookup_timeout_ms", 0),
        ("load_timeout_ms", 10**9),
        ("lease_ms", 60_001),
        ("staging_bytes", 1),
        ("max_store_backlog_bytes", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings({name: value})
    assert caught.value.field == name


def test_a_name_that_is_no_setting_is_refused_and_the_settings_are_listed() -> None:
    with pytest.raises(SettingsError, match="key_namespace") as caught:
        parse_settings({"key_namspace": "x"})
    assert caught.value.field == "key_namspace"


def test_a_namespace_has_up_to_64_bytes() -> None:
    assert parse_settings({"key_namespace": "ü" * 32}).key_namespace == "ü" * 32
