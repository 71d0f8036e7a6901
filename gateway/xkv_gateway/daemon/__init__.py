"""The composition root: every part of the running gateway is made and joined here, and nowhere else."""

from __future__ import annotations

from xkv_gateway.daemon.run import Daemon, build

__all__ = ["Daemon", "build"]
