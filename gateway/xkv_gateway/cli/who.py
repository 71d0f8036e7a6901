"""How the operator's commands name a tenant: by its name, `scope:HEX`, `_default`, or `-`: a salt on standard input.

A salt is a secret: it never stands on a command line, where other users of the machine see it.
"""

from __future__ import annotations

import getpass
import sys
from typing import TYPE_CHECKING, Final

from xkv_gateway.cli.admin_client import segment
from xkv_gateway.errors import ConfigError, RefusedError
from xkv_rpc import scope_of
from xkv_rpc.messages import DEFAULT_NAME, SCOPE_BYTES_MAX

if TYPE_CHECKING:
    from xkv_gateway.cli.admin_client import AdminClient

STANDARD_INPUT: Final = "-"
SALT_BYTES_READ_MAX: Final = 4096


def read_scope() -> bytes:
    """Read a salt from standard input (a terminal does not show it); return its scope. Raises ConfigError."""
    if sys.stdin.isatty():
        raw = getpass.getpass("salt: ").encode(errors="surrogateescape")
    else:
        raw = sys.stdin.buffer.read(SALT_BYTES_READ_MAX)
    # What a shell or an editor puts behind a line is not part of it.
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return scope_of(raw.decode())
    except UnicodeDecodeError:
        raise ConfigError("the salt on standard input is not UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"standard input: {error}") from None


def scope_option(text: str) -> str:
    """Return the hexadecimal of a scope that is given as HEX, `scope:HEX` or `_default`. Raises ConfigError."""
    digits = text.removeprefix("scope:")
    if text == DEFAULT_NAME:
        return ""
    try:
        scope = bytes.fromhex(digits)
    except ValueError:
        scope = b""
    if not scope or len(scope) > SCOPE_BYTES_MAX or len(digits) != 2 * len(scope):
        # The text is not repeated: somebody may have taken a salt for a scope.
        raise ConfigError(
            f"--scope: at most {SCOPE_BYTES_MAX} bytes in hexadecimal, or {DEFAULT_NAME}",
            advice="`xkv-gateway salt tag` makes a scope of a salt; salts never go on a command line.",
        )
    return scope.hex()


def find_scope(client: AdminClient, who: str) -> str:
    """Return the hexadecimal of the scope that `who` means. Raises ConfigError, RefusedError."""
    if who == STANDARD_INPUT:
        return read_scope().hex()
    if who == DEFAULT_NAME or who.startswith("scope:"):
        return scope_option(who)
    try:
        return str(client.get(f"/v1/tenants/{segment(who)}")["scope"])
    except RefusedError:
        raise RefusedError(
            "no tenant has that name",
            advice="`xkv-gateway tenant list` shows the names, `xkv-gateway tenant set NAME --scope HEX ...` gives one. Or write scope:HEX, "
            "_default, or - and give a salt on standard input (never on a command line).",
        ) from None


def quota_path(scope: str) -> str:
    """Return the path of the quota of a scope."""
    return f"/quota/scope:{scope}" if scope else f"/quota/{DEFAULT_NAME}"
