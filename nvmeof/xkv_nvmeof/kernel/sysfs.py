"""NVMe as sysfs tells it. Reading it asks no controller anything, so it does not block; what vanishes meanwhile is not there."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xkv_nvmeof.kernel.view import Controller, Namespace, Subsystem, View, is_namespace_node

SYSFS: Final = Path("/sys")
SECTOR_BYTES: Final = 512
"""`size` in sysfs counts these, whatever the blocks are."""
_TEXT_BYTES_MAX: Final = 4096


def text_of(path: Path) -> str:
    """Return what an attribute says, "" where there is none or it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(_TEXT_BYTES_MAX).decode(errors="replace").strip(" \n\0")
    except OSError:
        return ""


def number_of(path: Path, default: int = 0) -> int:
    """Return the whole number that an attribute says, else the default ("off", nothing, nonsense)."""
    text = text_of(path)
    return int(text) if text.isascii() and text.isdecimal() else default


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - names are all that is needed
    except OSError:
        return []


def address_fields(text: str) -> dict[str, str]:
    """Return the fields of an address such as `traddr=192.0.2.1,trsvcid=4420,src_addr=192.0.2.7`."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def host_id_text(text: str) -> str:
    """Return a host identifier in lower case, without hyphens."""
    return text.strip().lower().replace("-", "")


def read_view(root: Path = SYSFS) -> View:
    """Return all subsystems that Linux knows."""
    top = root / "class" / "nvme-subsystem"
    return tuple(_subsystem(root, top / name) for name in _names(top))


def _subsystem(root: Path, folder: Path) -> Subsystem:
    controllers, nodes = [], set()
    for name in _names(folder):
        if is_namespace_node(name):
            nodes.add(name)
        elif name.startswith("nvme") and name.removeprefix("nvme").isdecimal():
            controllers.append(_controller(name, folder / name))
            # Without native multipath the namespaces are below their controller.
            nodes.update(filter(is_namespace_node, _names(folder / name)))
    found = (_namespace(root / "block" / node) for node in sorted(nodes))
    return Subsystem(
        nqn=text_of(folder / "subsysnqn"),
        controllers=tuple(controllers),
        namespaces=tuple(one for one in found if one is not None),
        model=text_of(folder / "model"),
        serial=text_of(folder / "serial"),
    )


def _controller(name: str, folder: Path) -> Controller:
    address = address_fields(text_of(folder / "address"))
    return Controller(
        name=name,
        transport=text_of(folder / "transport"),
        traddr=address.get("traddr", ""),
        trsvcid=address.get("trsvcid", ""),
        state=text_of(folder / "state"),
        host_nqn=text_of(folder / "hostnqn"),
        host_id=host_id_text(text_of(folder / "hostid")),
    )


def _namespace(block: Path) -> Namespace | None:
    nsid = number_of(block / "nsid")
    if not nsid:
        return None
    nguid, own_uuid = namespace_ids(block)
    return Namespace(
        nsid=nsid,
        node=block.name,
        size_bytes=number_of(block / "size") * SECTOR_BYTES,
        block_bytes=number_of(block / "queue" / "logical_block_size"),
        nguid=nguid,
        uuid=own_uuid,
    )


def namespace_ids(block: Path) -> tuple[bytes, bytes]:
    """Return NGUID and UUID. A `uuid` that repeats the NGUID counts only if `wwid` says that it is one."""
    nguid, own_uuid = _id_of(block / "nguid"), _id_of(block / "uuid")
    if own_uuid == nguid and not text_of(block / "wwid").startswith("uuid."):
        own_uuid = bytes(16)
    return nguid, own_uuid


def _id_of(path: Path) -> bytes:
    with suppress(ValueError):
        return uuid.UUID(text_of(path)).bytes
    return bytes(16)


@dataclass(frozen=True, slots=True)
class Queue:
    """What Linux says of a block device."""

    size_bytes: int
    block_bytes: int
    volatile_write_cache: bool
    discard_bytes_max: int
    write_zeroes_bytes_max: int
    transfer_bytes_max: int
    io_timeout_ms: int
    read_only: bool
    partition: bool
    partitions: tuple[str, ...]


def queue_of(block: Path) -> Queue:
    """Return the facts of the block device whose folder that is."""
    queue = block / "queue"
    return Queue(
        size_bytes=number_of(block / "size") * SECTOR_BYTES,
        block_bytes=number_of(queue / "logical_block_size"),
        volatile_write_cache=text_of(queue / "write_cache") != "write through",
        discard_bytes_max=number_of(queue / "discard_max_bytes"),
        write_zeroes_bytes_max=number_of(queue / "write_zeroes_max_bytes"),
        transfer_bytes_max=number_of(queue / "max_sectors_kb") * 1024,
        io_timeout_ms=number_of(queue / "io_timeout", 30_000),
        read_only=number_of(block / "ro") != 0,
        partition=(block / "partition").exists(),
        partitions=tuple(name for name in _names(block) if (block / name / "partition").exists()),
    )


def block_folder(device_number: int, root: Path = SYSFS) -> Path | None:
    """Return the folder of the block device with that number, or None where there is none."""
    link = root / "dev" / "block" / f"{os.major(device_number)}:{os.minor(device_number)}"
    try:
        return link.resolve(strict=True)
    except OSError:
        return None


def folder_of(block: Path) -> tuple[int, int]:
    """Return which folder a block device has; (0, 0): none. One that comes later under the same name has another."""
    try:
        found = block.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def timeouts(folder: Path) -> list[Path]:
    """Return where the deadlines of commands through a controller are: at its own nodes, also those of single paths."""
    places = (folder / name / "queue" / "io_timeout" for name in _names(folder) if name.startswith("nvme"))
    return [place for place in places if place.exists()]


def loss_ms(folder: Path) -> int | None:
    """Return how long Linux keeps commands for a controller that is away; None: for ever. `folder` is the controller's."""
    for name in ("fast_io_fail_tmo", "ctrl_loss_tmo"):
        text = text_of(folder / name)
        if text.isascii() and text.isdecimal():
            return int(text) * 1000
    return None if text_of(folder / "ctrl_loss_tmo") == "off" else 0


def foreign_id(block: Path) -> bytes:
    """Return 16 bytes that stand for a device that is no NVMe namespace, made from the name it gives itself; zero: none."""
    for place in ("dm/uuid", "wwid", "device/wwid", "serial", "device/serial"):
        text = text_of(block / place)
        if text:
            return uuid.uuid5(uuid.NAMESPACE_OID, f"block-device:{text}").bytes
    return bytes(16)
