"""The kinds of values that settings have, and how text becomes one."""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from xkv_gateway.cardurl import NQN_BYTES_MAX
from xkv_gateway.sizes import parse_size

LIST_ITEMS_MAX: Final = 64
"""Items of one list: networks, listeners, hosts."""
NQN_FORM: Final = re.compile(r"nqn\.[0-9]{4}-(0[1-9]|1[0-2])\.[^:]")
KEY_TEXT: Final = re.compile(r"DHHC-1:|NVMeTLSkey-1:")
"""How keys begin; only their files may be named in a setting."""


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def nqn(value: str) -> str:
    """Return the NQN. Raises ValueError."""
    if (
        not 1 <= len(value.encode()) <= NQN_BYTES_MAX
        or not value.isascii()
        or not value.isprintable()
        or " " in value
    ):
        raise ValueError(f"must be 1 to {NQN_BYTES_MAX} printable ASCII characters without a space")
    if NQN_FORM.match(value) is None:
        raise ValueError("must be an NQN, such as nqn.2014-08.com.example:name: targets know no other names")
    return value


def _host_nqn(value: str) -> str:
    if nqn(value).endswith(".nvmexpress.discovery"):
        raise ValueError("must be the name of a host: that is the one of discovery controllers")
    return value


def _host_id(value: str) -> str:
    host_id = uuid.UUID(_uuid(value))
    if host_id.int == 0:
        raise ValueError("must not be all zero: targets refuse that")
    return str(host_id)


def _uuid(value: str) -> str:
    try:
        return str(uuid.UUID(value))
    except ValueError:
        raise ValueError("must be a UUID such as 6f1a2f0e-6c53-4a0b-8d34-0d8f2a9c1b7e") from None


def _host(value: str) -> str:
    if not value or value != value.strip() or "\0" in value:
        raise ValueError("must be an IP address or a host name")
    return value


def _socket_mode(value: str) -> str:
    if not re.fullmatch("0?[0-7]{3}", value) or int(value, 8) & 0o600 != 0o600:
        raise ValueError('must be octal permissions with which the owner can read and write, such as "0660"')
    return value


def _key_file(value: str) -> str:
    if KEY_TEXT.match(value):
        raise ValueError("must be the path of a file that holds the key, not the key itself")
    if not value.startswith("/") and "/" in value:
        raise ValueError("must be an absolute path, or the name of a systemd credential (no '/' in it)")
    return value


def _words(value: Any) -> Any:
    """A list; in a variable or a flag its items stand in one text, between commas."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    return tuple(value) if isinstance(value, list) else value


def tables(value: Any) -> Any:
    """A list of tables; in a variable it is JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("must be a list of tables (in a variable: JSON)") from None
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of tables")  # noqa: TRY004 - pydantic shows ValueErrors only
    return value


def _networks(value: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    for text in value:
        try:
            found.append(str(ipaddress.ip_network(text)))
        except ValueError as error:
            raise ValueError(f"{text!r} is no network such as 10.20.0.0/24: {error}") from None
    return tuple(found)


SIZE: Final = BeforeValidator(_size)
Size = Annotated[int, SIZE]
"""Bytes; in files and variables also as text with a unit."""
Host = Annotated[str, AfterValidator(_host)]
Port = Annotated[int, Field(ge=0, le=65535)]
NonEmpty = Annotated[str, Field(min_length=1)]
Nqn = Annotated[str, AfterValidator(nqn)]
HostNqn = Annotated[str, AfterValidator(_host_nqn)]
HostId = Annotated[str, AfterValidator(_host_id)]
Uuid = Annotated[str, AfterValidator(_uuid)]
SocketMode = Annotated[str, AfterValidator(_socket_mode)]
KeyFile = Annotated[NonEmpty, AfterValidator(_key_file)]
"""A file of a key, by absolute path; a bare name is a systemd credential."""
Words = Annotated[tuple[NonEmpty, ...], BeforeValidator(_words), Field(max_length=LIST_ITEMS_MAX)]
Networks = Annotated[Words, AfterValidator(_networks)]


class Section(BaseModel):
    """A table of the file: frozen, and every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)
