"""What can go wrong for an operator, and the exit code of the command that says so.

One table, `ExitCode`: the README documents each row, and a test compares the two.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from xkv_process.errors import CommandError


class ExitCode(IntEnum):
    """Exit codes of `xkv-gateway`, for scripts and service managers."""

    OK = 0
    """The command did what was asked; `serve`: ended cleanly after a signal."""
    DEGRADED = 1
    """`status`: the gateway answers, but its card is offline or not ready; `card check`, `doctor`: there are findings;
    `target plan`, `target status`: the target is not as it shall be."""
    CONFIG = 2
    """A flag, an environment variable or the configuration file is wrong; nothing was started."""
    UNREACHABLE = 3
    """No gateway answers at the address, or it went away in the middle."""
    ADDRESS_IN_USE = 4
    """A port or socket is taken, usually by another gateway; nothing was touched."""
    BIND_REFUSED = 5
    """An address outside of loopback without the explicit permission, or inside the storage network; nothing was bound."""
    CARD = 6
    """The card cannot be reached or used (also: locked by another process)."""
    STATE_DIR = 7
    """The state directory cannot be made, read or written."""
    MISMATCH = 8
    """`replay`: bytes came back that are not the ones that were stored."""
    CARD_LOST = 9
    """`serve`: another gateway took the card, or it was formatted, zeroed or exchanged while it was in use."""
    REFUSED = 10
    """`ns`, `tenant`, `quota`: the gateway refused it, or nobody confirmed it (`card adopt`, too): no such name, a name
    that is taken, no room for it.
    `target`: it would lose somebody's bytes, or touch what is not ours."""
    TARGET = 11
    """`target`: the target cannot be reached, or what was asked of it failed; applying again goes on from there."""
    INTERNAL = 70
    """A bug of ours: the log has the trace."""
    OUTPUT = 74
    """What was to be said could not be written to standard output."""
    FORCED = 75
    """`serve`: a second signal, or the stop deadline, ended it before it was done; other commands: Ctrl-C did."""


class GatewayError(CommandError):
    """Base of the errors that end a command of the gateway."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


class ConfigError(GatewayError):
    """A setting is wrong: the message names the key and where its value came from."""

    exit_code = ExitCode.CONFIG


class FabricRefusedError(ConfigError):
    """A target is, or would be, outside of the storage networks."""


class KeyNameError(ConfigError):
    """The name of a key, or a namespace, cannot be one, is taken or is not known."""


class GatewayUnreachableError(GatewayError):
    """No gateway answers."""

    exit_code = ExitCode.UNREACHABLE


class AddressInUseError(GatewayError):
    """Somebody else listens there."""

    exit_code = ExitCode.ADDRESS_IN_USE


class BindRefusedError(GatewayError):
    """The address is not a loopback address, and nobody has written down that it may be open; or only targets belong there."""

    exit_code = ExitCode.BIND_REFUSED


class CardUnavailableError(GatewayError):
    """The card cannot be reached or used."""

    exit_code = ExitCode.CARD


class CardAwayError(CardUnavailableError):
    """Nobody answers where the card should be: that may be another thing in a moment."""


class NotServingError(GatewayError):
    """A gateway answers, and says that it does not serve yet."""

    exit_code = ExitCode.DEGRADED


class CardLostError(GatewayError):
    """The card is not ours any more."""

    exit_code = ExitCode.CARD_LOST


class RefusedError(GatewayError):
    """The gateway said no, or the person who was asked did: nothing was changed."""

    exit_code = ExitCode.REFUSED


class TargetError(GatewayError):
    """The SPDK target cannot be reached, or did not do what was asked of it."""

    exit_code = ExitCode.TARGET


class TargetAwayError(TargetError):
    """The SPDK target cannot be reached, or does not answer."""


class TargetStepError(TargetError):
    """The SPDK target said no to a step."""


class TargetRefusedError(TargetError):
    """It would lose somebody's bytes, or is somebody else's: nothing was done."""

    exit_code = ExitCode.REFUSED


class StateDirError(GatewayError):
    """The state directory cannot be used."""

    exit_code = ExitCode.STATE_DIR
