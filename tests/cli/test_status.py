"""What `status` says when something else than a gateway answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from xkv_gateway.cli.status import _connection, fetch_status
from xkv_gateway.errors import ExitCode, GatewayUnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that gives one client this answer; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def http(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"\x1b]0;owned\x07\x1b[2J no status line\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000 + b"\r\n", "no HTTP"),
        (http(b"{}"), "HTTP status 200"),
        (http(b"[1]"), "HTTP status 200"),
        (http(b"\xff"), "HTTP status 200"),
        (http(b"[" * 100_000), "HTTP status 200"),
        (http(b"", b"404 Not Found"), "HTTP status 404"),
    ],
)
def test_what_is_not_a_gateway_is_said_in_our_words_alone(answer: bytes, what: str) -> None:
    with answering(answer) as port, pytest.raises(GatewayUnreachableError) as caught:
        fetch_status("127.0.0.1", port)
    assert str(caught.value) == f"what answers at 127.0.0.1:{port} is not a gateway's admin port ({what})"
    assert caught.value.exit_code == ExitCode.UNREACHABLE


def test_who_says_nothing_is_no_gateway() -> None:
    with answering(b"") as port, pytest.raises(GatewayUnreachableError, match="no gateway answers"):
        fetch_status("127.0.0.1", port)


def test_each_kind_of_connection_has_its_words() -> None:
    negotiated = {
        "max_transfer_bytes": 1 << 20,
        "in_capsule_bytes": 4096,
        "header_digest": True,
        "data_digest": False,
        "queue_entries": 128,
        "io_queues": 4,
        "keep_alive_ms": 10_000,
        "authenticated": None,
    }
    linux = {"node": "nvme0n1", "controllers": ["nvme0"], "io_timeout_ms": 5_000, "late_ms": 20_000}
    attached = {"node": "loop0", "controllers": [], "io_timeout_ms": 30_000, "late_ms": 30_000}
    assert _connection({}) == "none"
    assert "not authenticated" in _connection(negotiated)
    proved = {"hash": "SHA-256", "group": "NULL", "both_ways": False}
    assert "(SHA-256, NULL, this host only)" in _connection({**negotiated, "authenticated": proved})
    assert "through nvme0, connected by this gateway" in _connection({**linux, "connected by us": True})
    assert "through nvme0, connected by somebody else" in _connection({**linux, "connected by us": False})
    assert _connection(attached).startswith("by Linux, /dev/loop0, commands end within 30 s")
