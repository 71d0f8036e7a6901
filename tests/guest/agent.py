"""Runs in the guest: does what the tests say. It calls the host, and ends when the host hangs up.

One request and one reply at a time, each a line of JSON. Needs the standard library only, which keeps its start short.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

started: dict[int, subprocess.Popen[bytes]] = {}


def run(argv: list[str], timeout_s: float, env: dict[str, str]) -> dict[str, Any]:
    """Run a program to its end; 124 means that it was killed at its deadline."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, **env},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"code": 124, "out": _text(error.stdout), "err": _text(error.stderr)}
    except OSError as error:
        return {"code": 127, "out": "", "err": str(error)}
    return {"code": done.returncode, "out": _text(done.stdout), "err": _text(done.stderr)}


def start(argv: list[str], log: str, env: dict[str, str]) -> dict[str, Any]:
    """Start a program; its output goes to a file."""
    with Path(log).open("wb") as stream:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
    started[process.pid] = process
    return {"pid": process.pid}


def end(pid: int, number: int, timeout_s: float) -> dict[str, Any]:
    """Send a signal to a program that was started, and wait for its end; the code is None if it does not end."""
    process = started[pid]
    if process.poll() is None:
        os.kill(pid, signal.Signals(number))
    try:
        return {"code": process.wait(timeout_s)}
    except subprocess.TimeoutExpired:
        return {"code": None}


def put(path: str, data: str, mode: int) -> dict[str, Any]:
    """Write a file; `data` is base64."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(base64.b64decode(data))
    Path(path).chmod(mode)
    return {}


def fetch(url: str) -> dict[str, Any]:
    """GET a page of this guest; the status is 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return {"status": reply.status, "body": _text(reply.read())}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": _text(error.read())}
    except OSError as error:
        return {"status": 0, "body": str(error)}


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode(errors="replace")


OPERATIONS = {function.__name__: function for function in (run, start, end, put, fetch)}


def main() -> int:
    """Serve the host; return 0 once it hangs up."""
    with socket.create_connection(("10.0.2.2", int(sys.argv[1])), timeout=None) as connection:
        stream = connection.makefile("rwb")
        for line in stream:
            request = json.loads(line)
            reply = OPERATIONS[request.pop("do")](**request)
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
