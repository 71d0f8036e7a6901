"""Soft cards as processes, and a host on a plain socket, for tests."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from xkv_nvmeof.command import CompletionEntry, ConnectCommand, ConnectData, SubmissionEntry
from xkv_nvmeof.framing import DataEnd, FrameReader, host_limits
from xkv_nvmeof.initiator import InitiatorOptions, TargetAddress, TcpInitiator
from xkv_nvmeof.pdu import (
    PLAIN,
    C2HData,
    C2HTermReq,
    CapsuleResp,
    ICReq,
    ICResp,
    encode,
    encode_command,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xkv_nvmeof.pdu import Pdu

DEADLINE_S = 120
HOST_NQN = "nqn.2026-01.org.example:host"
HOST_ID = bytes(range(1, 17))


@dataclass
class CardProcess:
    process: subprocess.Popen[bytes]
    ready: dict[str, Any]

    @property
    def address(self) -> TargetAddress:
        return TargetAddress(self.ready["host"], self.ready["port"], self.ready["nqn"])

    def tell(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; returns the exit code and its log."""
        self.process.send_signal(number)
        _out, log = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, log.decode()

    def counters(self, log: str) -> dict[str, int]:
        """The counters of the exit line."""
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        (line,) = [line for line in lines if line["event"] == "exit"]
        counters: dict[str, int] = line["counters"]
        return counters


def command_line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "xkv_nvmeof.softcard", *map(str, arguments)]


@contextmanager
def running_card(*arguments: str | Path, file_limit_bytes: int | None = None) -> Iterator[CardProcess]:
    """A soft card that is ready; killed at the end when it still runs."""

    def limit() -> None:
        if file_limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))

    process = subprocess.Popen(
        command_line(*arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=limit,  # noqa: PLW1509 - the test process has no threads that matter to the child
    )
    with process:
        try:
            assert process.stdout is not None
            readable, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
            line = process.stdout.readline() if readable else b""
            if not line:
                process.kill()
                assert process.stderr is not None
                raise AssertionError(process.stderr.read().decode())
            yield CardProcess(process, json.loads(line))
        finally:
            if process.poll() is None:
                process.kill()


def refused_card(*arguments: str | Path) -> str:
    """Run a soft card that must not start; returns what it says."""
    done = subprocess.run(
        command_line(*arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode != 0
    assert not done.stdout
    assert b"Traceback" not in done.stderr
    return done.stderr.decode()


async def attach(card: CardProcess, **changes: Any) -> TcpInitiator:
    options = InitiatorOptions(HOST_NQN, HOST_ID, **{"reconnect_delay_min_ms": 5} | changes)
    return await TcpInitiator.connect(card.address, options, clock=time.monotonic_ns, entropy=os.urandom)


class SocketHost:
    """A blocking host: sends what it is told, byte by byte if wished, and reads PDUs."""

    def __init__(self, card: CardProcess, *, step_bytes: int = 0) -> None:
        self.socket = socket.create_connection((card.ready["host"], card.ready["port"]), timeout=DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._step_bytes = step_bytes
        self._reader = FrameReader(host_limits(1 << 24))
        self._established = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        step = self._step_bytes or max(len(data), 1)
        for at in range(0, len(data), step):
            self.socket.sendall(data[at : at + step])

    def receive(self) -> tuple[Pdu, bytes] | None:
        """The next PDU and its data; None: the card closed the connection."""
        pdu, data = None, b""
        while True:
            event = self._reader.next_event()
            if event is None:
                chunk = self.socket.recv(65536)
                if not chunk:
                    return None
                self._reader.feed(memoryview(chunk))
            elif isinstance(event, memoryview):
                data += bytes(event)
            elif isinstance(event, DataEnd):
                assert pdu is not None
                return pdu, data
            else:
                pdu = event
                if isinstance(pdu, ICResp):
                    self._reader.establish(PLAIN)
                if not isinstance(pdu, C2HData):
                    return pdu, data

    def init(self) -> None:
        self.send(encode(ICReq()))
        answer = self.receive()
        assert answer is not None
        assert isinstance(answer[0], ICResp)

    def command(self, entry: SubmissionEntry, data: bytes = b"") -> tuple[CompletionEntry, bytes]:
        """Send a command and wait for its completion; returns it and the data that came."""
        self.send(encode_command(entry.to_bytes(), len(data), PLAIN) + data)
        received = b""
        while True:
            answer = self.receive()
            assert answer is not None
            pdu, part = answer
            received += part
            if isinstance(pdu, CapsuleResp):
                return CompletionEntry.from_bytes(pdu.cqe), received

    def connect(self, nqn: str, qid: int = 0, cntlid: int = 0xFFFF, kato_ms: int = 0) -> CompletionEntry:
        command = ConnectCommand(1, qid, 31, kato_ms)
        data = ConnectData(HOST_ID, cntlid, nqn, HOST_NQN)
        return self.command(command.to_entry(), data.to_bytes())[0]

    def last_words(self) -> C2HTermReq | None:
        """The TermReq that comes before the card closes the connection; None: it just closes."""
        found = None
        while (answer := self.receive()) is not None:
            if isinstance(answer[0], C2HTermReq):
                found = answer[0]
        return found
