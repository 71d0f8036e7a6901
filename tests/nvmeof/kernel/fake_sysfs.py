"""A folder that looks like sysfs with NVMe in it."""

from __future__ import annotations

import shutil
import uuid
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

HOST_NQN: Final = "nqn.2026-01.org.example:host"
HOST_ID: Final = bytes(range(1, 17))
NQN: Final = "nqn.2014-08.com.example:card"


class FakeSysfs:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")

    def subsystem(self, number: int = 0, nqn: str = NQN) -> None:
        top = f"class/nvme-subsystem/nvme-subsys{number}"
        for name, text in (("subsysnqn", nqn), ("model", "Linux"), ("serial", "0123")):
            self.write(f"{top}/{name}", text)

    def controller(
        self,
        name: str = "nvme0",
        *,
        subsystem: int = 0,
        state: str = "live",
        address: str = "traddr=127.0.0.1,trsvcid=4420,src_addr=127.0.0.1",
        host_nqn: str = HOST_NQN,
        host_id: bytes = HOST_ID,
        transport: str = "tcp",
    ) -> None:
        own = f"class/nvme/{name}"
        fields = {
            "transport": transport,
            "address": address,
            "state": state,
            "hostnqn": host_nqn,
            "hostid": uuid.UUID(bytes=host_id),
            "kato": 10,
            "ctrl_loss_tmo": 20,
            "fast_io_fail_tmo": "off",
        }
        for field, text in fields.items():
            self.write(f"{own}/{field}", text)
        link = self.root / f"class/nvme-subsystem/nvme-subsys{subsystem}/{name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(self.root / own)

    def namespace(
        self,
        node: str = "nvme0n1",
        *,
        subsystem: int = 0,
        nsid: int = 1,
        size_bytes: int = 16 << 20,
        block_bytes: int = 4096,
        nguid: bytes = b"\x11" * 16,
        own_uuid: bytes = b"\x22" * 16,
    ) -> Path:
        block = f"block/{node}"
        fields = {
            "size": size_bytes // 512,
            "nsid": nsid,
            "dev": "259:0",
            "ro": 0,
            "nguid": uuid.UUID(bytes=nguid),
            # Without a UUID Linux shows the NGUID in its place.
            "uuid": uuid.UUID(bytes=own_uuid if any(own_uuid) else nguid),
            "wwid": f"uuid.{uuid.UUID(bytes=own_uuid)}" if any(own_uuid) else f"eui.{nguid.hex()}",
            "queue/logical_block_size": block_bytes,
            "queue/write_cache": "write back",
            "queue/discard_max_bytes": 1 << 30,
            "queue/write_zeroes_max_bytes": 1 << 20,
            "queue/max_sectors_kb": 1280,
            "queue/io_timeout": 30_000,
        }
        for field, text in fields.items():
            self.write(f"{block}/{field}", text)
        (self.root / f"class/nvme-subsystem/nvme-subsys{subsystem}/{node}").mkdir(parents=True, exist_ok=True)
        return self.root / block

    def remove(self, path: str) -> None:
        place = self.root / path
        if place.is_symlink() or place.is_file():
            place.unlink()
        else:
            shutil.rmtree(place)
