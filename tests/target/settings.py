"""Configurations of targets, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from xkv_gateway.config import TargetConfig
from xkv_gateway.networks import StorageNetworks
from xkv_gateway.target.desired import DesiredTarget, desired_of

NQN: Final = "nqn.2014-08.com.example:card0"
HOST: Final = "nqn.2014-08.com.example:host"
OTHER: Final = "nqn.2014-08.com.example:other"
STORAGE: Final = StorageNetworks(["127.0.5.0/24"])
AIO: Final = {"kind": "aio", "name": "xkv-bdev0", "file": "/srv/card.img"}
MALLOC: Final = {"kind": "malloc", "name": "xkv-bdev0", "size": 64 << 20}
KEYED: Final = {"nqn": HOST, "dhchap_key_file": "/k/host", "dhchap_ctrl_key_file": "/k/target"}


def wanted(**changes: Any) -> DesiredTarget:
    """Return a target of one host on a file, with changes."""
    settings = {
        "rpc": "/nowhere/spdk.sock",
        "nqn": NQN,
        "listeners": ["127.0.5.1:4420"],
        "hosts": [{"nqn": HOST}],
        "bdev": AIO,
        **changes,
    }
    return desired_of(TargetConfig(**settings), STORAGE, Path("/run/credentials"))
