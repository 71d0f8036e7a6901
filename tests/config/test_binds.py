from __future__ import annotations

import socket

import pytest

from xkv_gateway.binds import bind_tcp, is_loopback, judge_bind
from xkv_gateway.errors import AddressInUseError, BindRefusedError, ConfigError, ExitCode


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1"])
def test_loopback_addresses_are_known(ip: str) -> None:
    assert is_loopback(ip)


@pytest.mark.parametrize(
    "ip", ["0.0.0.0", "::", "128.0.0.1", "10.0.0.1", "::ffff:10.0.0.1", "::2", "fe80::1", "::ffff:0:0"]
)
def test_other_addresses_are_not_loopback(ip: str) -> None:
    assert not is_loopback(ip)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1", "2001:db8::1", "0", "3221225985"]
)
def test_an_open_address_is_refused_without_the_permission(host: str) -> None:
    with pytest.raises(BindRefusedError, match="refusing to listen") as caught:
        judge_bind(host, 1, section="control", allow_unauthenticated=False)
    assert caught.value.exit_code is ExitCode.BIND_REFUSED
    assert "[control] allow_unauthenticated = true" in caught.value.advice


def test_an_open_address_is_taken_with_the_permission() -> None:
    assert judge_bind("0.0.0.0", 1, section="admin", allow_unauthenticated=True).ip == "0.0.0.0"


def test_a_name_is_judged_by_what_it_resolves_to() -> None:
    bind = judge_bind("localhost", 1, section="control", allow_unauthenticated=False)
    assert is_loopback(bind.ip)
    assert bind.asked == "localhost"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "\udcff"])
def test_a_name_that_does_not_resolve_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.bind_address"):
        judge_bind(host, 1, section="control", allow_unauthenticated=False)


def test_a_taken_port_is_an_error_with_the_address_and_leaves_the_first_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        bind = judge_bind("127.0.0.1", port, section="admin", allow_unauthenticated=False)
        with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port}") as caught:
            bind_tcp(bind, section="admin")
        assert "--admin-port" in caught.value.advice
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            first.accept()[0].close()


def test_an_address_of_another_machine_is_named() -> None:
    bind = judge_bind("192.0.2.1", 0, section="control", allow_unauthenticated=True)
    with pytest.raises(ConfigError, match="not an address of this machine"):
        bind_tcp(bind, section="control")
