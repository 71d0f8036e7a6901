"""What can go wrong for an operator, and the exit code of the command that says so. One table, `ExitCode`."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from xkv_process.errors import CommandError


class ExitCode(IntEnum):
    """Exit codes of `xkv-frontend`, for scripts and service managers."""

    OK = 0
    """Done; `verify`: tenants are kept apart and keep their cache."""
    FAILED = 1
    """`verify`: they are not; `timing`: with salts, a signal was found."""
    CONFIG = 2
    """A flag, a variable or a file is wrong; nothing was started."""
    UNREACHABLE = 3
    """The front end or vLLM does not answer, or refuses the tool's requests."""
    ADDRESS_IN_USE = 4
    """A port is taken."""
    INCONCLUSIVE = 8
    """`verify`, `timing`: what was seen proves nothing either way."""
    INTERNAL = 70
    """A bug of ours: the log has the trace."""
    OUTPUT = 74
    """What was to be said could not be written to standard output."""
    FORCED = 75
    """`serve`: ended by force, by a second signal."""


class FrontendError(CommandError):
    """Base of the errors that end a command of the front end."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class ConfigError(FrontendError):
    """A setting or a file is wrong."""

    exit_code = ExitCode.CONFIG


class UnreachableError(FrontendError):
    """Somebody does not answer as needed."""

    exit_code = ExitCode.UNREACHABLE


class AddressInUseError(FrontendError):
    """Somebody else listens there."""

    exit_code = ExitCode.ADDRESS_IN_USE
