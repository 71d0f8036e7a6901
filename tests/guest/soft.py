"""A soft card of this machine, for the guest; and the settings of a gateway in the guest that uses it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST: Final = "10.0.2.2"
"""This machine, as the guest sees it."""
HOST_ID: Final = uuid.UUID("0c0ffee0-0000-4000-8000-000000000001")
HOST_NQN: Final = f"nqn.2014-08.org.nvmexpress:uuid:{HOST_ID}"


@contextlib.contextmanager
def soft_card(size: str, *more: str) -> Iterator[dict[str, Any]]:
    """Run one for the time of the block; what it says of itself."""
    command = ["-m", "xkv_nvmeof.softcard", "--size", size, "--exit-with-stdin", *more]
    if "--file" not in more:
        command.append("--memory")
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        try:
            yield {**json.loads(process.stdout.readline()), "process": process}
        finally:
            process.kill()


def settings(url: str, more: str = "", networks: str = "10.0.2.0/24") -> str:
    """Return the configuration of a gateway whose card is at `url`; `more` are lines of [nvme] and what follows."""
    return f"""
        [card]
        url = "{url}"
        [fabric]
        networks = {networks.split()}
        [control]
        port = 5557
        [admin]
        port = 5558
        [nvme]
        host_nqn = "{HOST_NQN}"
        host_id = "{HOST_ID}"
        {more}
    """
