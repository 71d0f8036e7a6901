"""The keys of DH-HMAC-CHAP: whether a start can use them, and whether they go with those that the target is given.

Reads files, and shows nothing of what they hold.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from xkv_gateway.doctor.checks import Finding, Level
from xkv_gateway.errors import ConfigError
from xkv_gateway.target.hostkeys import read_host_keys, read_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xkv_gateway.config import Config
    from xkv_nvmeof.dhchap.host import HostKeys
    from xkv_nvmeof.dhchap.secret import DhchapSecret

CHECK: Final = "keys"
ONE_SIDED: Final = {
    ("dhchap_key_file", False, True): (
        Level.PROBLEM,
        "the target asks this host for a key, and fabric.dhchap_key_file is not set",
    ),
    ("dhchap_key_file", True, False): (
        Level.NOTE,
        "the target asks this host for no key: fabric.dhchap_key_file is of no use",
    ),
    ("dhchap_ctrl_key_file", True, False): (
        Level.PROBLEM,
        "the target has to prove itself, and target.hosts dhchap_ctrl_key_file is not set",
    ),
}
"""(setting, whether this host has it, whether the target has it) -> how bad that is, and why."""


def examine_keys(config: Config, credentials: Path | None) -> list[Finding]:
    """Return what is wrong with the keys; or that they are in order, where there are any."""
    try:
        ours = read_host_keys(config.fabric, credentials)
    except ConfigError as error:
        return [Finding(CHECK, Level.PROBLEM, str(error), error.advice)]
    found = list(_at_the_target(config, ours, credentials))
    if not found and ours is not None:
        ways = (
            "this host proves itself"
            if ours.controller is None
            else "this host and the target prove themselves"
        )
        found.append(Finding(CHECK, Level.OK, ways))
    return found


def _at_the_target(config: Config, ours: HostKeys | None, credentials: Path | None) -> Iterator[Finding]:
    """Compare with what `[target]` declares for this host."""
    target, name = config.target, config.nvme.host_nqn
    if target.rpc is None or name is None or target.allow_any_host:
        return
    host = next((one for one in target.hosts if one.nqn == name), None)
    if host is None:
        text = f"target.hosts lets others in, not this host ({name})"
        yield Finding(CHECK, Level.PROBLEM, text, "Add it, or correct nvme.host_nqn.")
        return
    mine = None if ours is None else ours.host
    theirs = None if ours is None else ours.controller
    yield from _pair("dhchap_key_file", mine, host.dhchap_key_file, credentials)
    yield from _pair("dhchap_ctrl_key_file", theirs, host.dhchap_ctrl_key_file, credentials)


def _pair(
    setting: str, ours: DhchapSecret | None, file: str | None, credentials: Path | None
) -> Iterator[Finding]:
    """Compare a key of this host's with the file that the target is given for it."""
    if ours is None or file is None:
        if (setting, ours is not None, file is not None) in ONE_SIDED:
            level, text = ONE_SIDED[setting, ours is not None, file is not None]
            yield Finding(CHECK, level, text, "Set both, or none.")
        return
    if not _readable(file, credentials):
        return
    declared = f"target.hosts {setting}"
    try:
        other = read_key(declared, file, credentials)
    except ConfigError as error:
        yield Finding(CHECK, Level.PROBLEM, str(error), error.advice)
        return
    if not ours.is_same_as(other):
        text = f"fabric.{setting} and {declared} hold different keys"
        yield Finding(CHECK, Level.PROBLEM, text, "Copy one over the other; each end reads its own file.")


def _readable(file: str, credentials: Path | None) -> bool:
    """Tell whether it can be read here: the target's own files often cannot, and need not."""
    if file.startswith("/"):
        return os.access(file, os.R_OK)
    return credentials is not None and os.access(credentials / file, os.R_OK)
