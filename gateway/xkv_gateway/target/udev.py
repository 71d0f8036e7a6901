"""Whose a card's node under /dev is, told to udev: it gives a node back to its default group whenever a writer has closed it.

A rule of this boot, for the namespaces of one subsystem. Where there is no udev, nothing takes away what was set by hand.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import Final

from xkv_nvmeof.blockdev import DeviceError
from xkv_nvmeof.kernel.tool import NvmeTool

log = logging.getLogger(__name__)

UDEV: Final = Path("/run/udev")
RELOAD_S: Final = 5.0
_PLAIN: Final = re.compile(r"[^A-Za-z0-9.:_-]", re.ASCII)


def rule(nqn: str, group_id: int, mode: int) -> str:
    """Return the rule. What could be a pattern or end the text in an NQN stands for any character."""
    return (
        f'ACTION!="remove", SUBSYSTEM=="block", KERNEL=="nvme*", ATTRS{{subsysnqn}}=="{_PLAIN.sub("?", nqn)}",'
        f' GROUP="{group_id}", MODE="{mode:04o}"\n'
    )


def _file(nqn: str, udev: Path) -> Path:
    name = hashlib.blake2b(nqn.encode(), digest_size=6).hexdigest()
    return udev / "rules.d" / f"70-xkv-card-{name}.rules"


async def give(nqn: str, group_id: int, mode: int, udev: Path = UDEV) -> None:
    """Have the nodes of the subsystem's namespaces belong to the group, those that appear later too."""
    if _write(_file(nqn, udev), rule(nqn, group_id, mode), udev):
        await _reload()


def _write(path: Path, text: str, udev: Path) -> bool:
    """Return whether there is a udev that can be told so."""
    if not udev.is_dir():
        return False
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        log.warning("%s: %s; udev may take the device away from its group", path, error.strerror)
        return False
    return True


async def take_back(nqn: str, udev: Path = UDEV) -> None:
    """Forget what was said of the subsystem."""
    path = _file(nqn, udev)
    try:
        path.unlink()
    except OSError:
        return  # nothing was said, or by somebody else
    await _reload()


async def _reload() -> None:
    """It would notice by itself, after some seconds."""
    try:
        await NvmeTool("udevadm").run(("control", "--reload"), RELOAD_S)
    except DeviceError as error:
        log.warning("udevadm: %s", error)
