"""The guest's first file system: busybox, the kernel's modules in the order of their needs, and `init.sh`. A cpio archive."""

from __future__ import annotations

import lzma
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .packages import Parts

MODULES: Final = (
    "virtio_pci",
    "virtio_net",
    "virtiofs",
    "overlay",
    "configfs",
    "nvme-tcp",
    "nvmet-tcp",
    "brd rd_nr=2 rd_size=196608",
    "loop",
)
"""With parameters. What the kernel has built in has no file, and is passed over."""
INIT: Final = Path(__file__).with_name("init.sh")


def load_order(modules: Path, wanted: Iterable[str] = MODULES) -> list[tuple[Path, str]]:
    """Return the files of the modules and of what they need, each after its needs, with parameters."""
    files = {path.name.partition(".")[0].replace("-", "_"): path for path in modules.rglob("*.ko*")}
    order: dict[str, tuple[Path, str]] = {}

    def add(name: str, parameters: str) -> None:
        path = files.get(name)
        if path is None or name in order:
            return
        found = re.search(rb"\0depends=([^\0]*)\0", _content(path))
        for need in () if found is None else found[1].decode().split(","):
            add(need.replace("-", "_"), "")
        order[name] = (path, parameters)

    for entry in wanted:
        name, _, parameters = entry.partition(" ")
        add(name.replace("-", "_"), parameters)
    return list(order.values())


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _member(number: int, name: str, mode: int, data: bytes) -> bytes:
    """Return an entry in the "newc" format: hexadecimal header, name, data, each filled up to a multiple of 4."""
    encoded = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def initramfs(parts: Parts, settings: dict[str, str]) -> bytes:
    """Return the archive; `init.sh` reads the settings as shell variables."""
    entries: list[tuple[str, int, bytes]] = [
        (name, 0o040755, b"")
        for name in ("bin", "dev", "proc", "sys", "modules", "host", "layer", "top", "new")
    ]
    entries += [
        ("bin/busybox", 0o100755, parts.busybox.read_bytes()),
        ("init", 0o100755, INIT.read_bytes()),
        ("settings", 0o100644, "".join(f"{k}={shlex.quote(v)}\n" for k, v in settings.items()).encode()),
    ]
    lines = []
    for path, parameters in load_order(parts.modules):
        name = path.name.removesuffix(".xz")
        entries.append((f"modules/{name}", 0o100644, _content(path)))
        lines.append(f"{name} {parameters}\n")
    entries.append(("modules/order", 0o100644, "".join(lines).encode()))
    archive = [_member(number, *entry) for number, entry in enumerate(entries, 1)]
    return b"".join(archive) + _member(0, "TRAILER!!!", 0, b"")
