"""The admin port, as the commands of an operator use it."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import quote

import click

from xkv_gateway.binds import host_port
from xkv_gateway.cli.options import config_option, load_settings
from xkv_gateway.cli.status import WILDCARDS, split_admin
from xkv_gateway.errors import (
    CardUnavailableError,
    ConfigError,
    GatewayError,
    GatewayUnreachableError,
    RefusedError,
)
from xkv_gateway.service.tokens import read_token
from xkv_process.text import ascii_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

TIMEOUT_S: Final = 40.0
"""Above the longest time for which a change may wait for the card."""
ANSWER_BYTES_MAX: Final = 64 << 20
PAGE: Final = 1000


class _UnixConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is not an error."""

    status: int
    body: dict[str, Any]


class AdminClient:
    """Speaks to one gateway; a connection a request.

    Args:
        host: of the admin port.
        port: of the admin port.
        unix_path: used instead of both where it is given.
        token: sent with each request; None: none.
    """

    def __init__(
        self, host: str, port: int, *, unix_path: str | None = None, token: str | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._unix_path = unix_path
        self._token = token
        self.where = unix_path or host_port(host, port)

    def get(self, path: str) -> dict[str, Any]:
        """Return what `GET path` answers. Raises GatewayError."""
        return self.ask("GET", path).body

    def pages(self, path: str, name: str) -> Iterator[dict[str, Any]]:
        """Yield the entries `name` of all pages of a list."""
        cursor: int | None = 0
        while cursor is not None:
            page = self.get(f"{path}?cursor={cursor}&count={PAGE}")
            yield from page[name]
            cursor = page["next_cursor"]

    def ask(self, method: str, path: str, body: str | None = None) -> Answer:
        """Send a request.

        Raises:
            GatewayUnreachableError: nobody answers there, or somebody else does.
            CardUnavailableError: the card cannot take the change now.
            ConfigError: a token is missing or wrong.
            RefusedError: anything else that the gateway says no to.
        """
        status, raw = self._exchange(method, path, body)
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self._somebody_else(f"HTTP status {status}")
        if status < HTTPStatus.BAD_REQUEST:
            return Answer(status, answer)
        error = answer.get("error")
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            self._somebody_else(f"HTTP status {status}")
        raise self._refusal(status, ascii_only(error["message"]))

    def _exchange(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
            if self._unix_path is None
            else _UnixConnection(self._unix_path)
        )
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        try:
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(ANSWER_BYTES_MAX)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise GatewayUnreachableError(
                f"no gateway answers at {self.where}: {reason}",
                advice="Start one with `xkv-gateway serve`, or name its admin port with --admin HOST:PORT.",
            ) from None
        except http.client.HTTPException:
            self._somebody_else("no HTTP")
        finally:
            connection.close()

    def _somebody_else(self, what: str) -> NoReturn:
        raise GatewayUnreachableError(
            f"what answers at {self.where} is not a gateway's admin port ({what})",
            advice="Name the admin port with --admin HOST:PORT.",
        )

    def _refusal(self, status: int, message: str) -> GatewayError:
        match status:
            case HTTPStatus.SERVICE_UNAVAILABLE:
                return CardUnavailableError(
                    message, advice="`xkv-gateway status` says more; try again later."
                )
            case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
                advice = "Name the file of a token with --token-file, or in the settings (admin.token_file)."
                return ConfigError(f"{self.where}: {message}", advice=advice)
            case HTTPStatus.INTERNAL_SERVER_ERROR:
                return GatewayError(f"{self.where}: {message}")
            case _:
                return RefusedError(message)


def segment(name: str) -> str:
    """Return a name as it stands in a path."""
    return quote(name, safe="")


def admin_command(function: Callable[..., T]) -> Callable[..., T]:
    """Add `--admin`, `--config`, `--token-file` and `--json`; the function gets a `client` and `as_json`."""

    @wraps(function)
    def run(
        *arguments: Any, admin: str | None, file: Path | None, token_file: Path | None, **options: Any
    ) -> T:
        return function(*arguments, client=open_client(admin, file, token_file), **options)

    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON."),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Token of the admin port. Default: as configured.",
        ),
        config_option(),
        click.option(
            "--admin", metavar="HOST:PORT", help="Admin port of the gateway. Default: as configured."
        ),
    ):
        run = decorate(run)
    return run


def open_client(admin: str | None, file: Path | None, token_file: Path | None = None) -> AdminClient:
    """Return a client of the gateway that the options and the settings name. Raises ConfigError."""
    settings = load_settings(file, {}).config.admin
    # The one that may also change things, where both are there.
    named = token_file or settings.token_file or settings.read_token_file
    token = None if named is None else read_token(Path(named), "--token-file", private=True)
    if admin is not None:
        return AdminClient(*split_admin(admin), token=token)
    host = WILDCARDS.get(settings.bind_address, settings.bind_address)
    return AdminClient(host, settings.port, unix_path=settings.socket, token=token)
