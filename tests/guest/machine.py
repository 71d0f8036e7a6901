"""A guest that runs: QEMU without hardware acceleration, virtiofsd, and the connection to the agent."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .image import initramfs
from .packages import parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AGENT: Final = Path(__file__).with_name("agent.py")
BOOT_S: Final = 300.0
"""It takes 4 to 10 seconds; a machine that is busy with other tests takes longer."""
LIFE_S: Final = 3000
MEMORY_MIB: Final = 1536
COMMAND_S: Final = 180.0
HANG_S: Final = 600.0
"""Nothing takes that long, on a busy machine either: starting a program takes 10 seconds of an emulated processor."""
OURS: Final = ("xkv_gateway", "xkv_nvmeof", "xkv_process", "xkv_rpc")
MARGIN_S: Final = 30.0


@dataclass(frozen=True)
class Done:
    """What a program in the guest left behind."""

    code: int
    out: str
    err: str


class Guest:
    """The guest's agent, as seen from here. Blocking; every call ends at a deadline."""

    def __init__(self, connection: socket.socket, monitor: Path, serial: Path, packages: Path) -> None:
        self.packages = packages
        """Where our packages are, compiled; it is the first entry of the path of every Python in the guest."""
        self._connection = connection
        self._stream = connection.makefile("rwb")
        self._monitor = monitor
        self._serial = serial

    def _ask(self, do: str, wait_s: float = COMMAND_S, **arguments: Any) -> dict[str, Any]:
        self._connection.settimeout(wait_s + MARGIN_S)
        self._stream.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        assert line, f"the guest is gone:\n{self.serial_log[-2000:]}"
        return dict(json.loads(line))

    @property
    def serial_log(self) -> str:
        """What the guest's kernel and first process said."""
        return self._serial.read_text(errors="replace")

    def run(self, *argv: str, timeout_s: float = COMMAND_S, env: Mapping[str, str] | None = None) -> Done:
        """Run a program to its end."""
        return Done(**self._ask("run", timeout_s, argv=argv, timeout_s=timeout_s, env=dict(env or {})))

    def must(self, *argv: str, timeout_s: float = COMMAND_S, env: Mapping[str, str] | None = None) -> str:
        """Run a program that has to succeed; return its output."""
        done = self.run(*argv, timeout_s=timeout_s, env=env)
        assert done.code == 0, f"{shlex.join(argv)} ended with {done.code}:\n{done.out}\n{done.err}"
        return done.out

    def sh(self, script: str) -> str:
        """Run a shell script that has to succeed; return its output."""
        return self.must("sh", "-euc", script)

    def start(self, *argv: str, log: str, env: Mapping[str, str] | None = None) -> int:
        """Start a program; return its process id."""
        return int(self._ask("start", argv=argv, log=log, env=dict(env or {}))["pid"])

    def end(self, pid: int, number: signal.Signals = signal.SIGTERM, timeout_s: float = 90.0) -> int | None:
        """Send a signal to a started program; return its exit code, or None if it goes on."""
        code = self._ask("end", timeout_s, pid=pid, number=int(number), timeout_s=timeout_s)["code"]
        return None if code is None else int(code)

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file."""
        self._ask("put", path=path, data=base64.b64encode(text.encode()).decode(), mode=mode)

    def fetch(self, url: str) -> tuple[int, str]:
        """GET a page from inside; return status (0: nobody answers) and body."""
        reply = self._ask("fetch", url=url)
        return int(reply["status"]), str(reply["body"])

    def until(self, what: str, script: str, timeout_s: float = HANG_S) -> str:
        """Run a shell script until it succeeds; return its output."""
        ends = time.monotonic() + timeout_s
        while True:
            done = self.run("sh", "-euc", script)
            if done.code == 0:
                return done.out
            assert time.monotonic() < ends, f"{what}: not within {timeout_s:.0f} s:\n{done.out}\n{done.err}"
            time.sleep(0.2)

    def forward(self, port: int) -> int:
        """Make a TCP port of the guest reachable; return the port here."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(MARGIN_S)
            monitor.connect(str(self._monitor))
            stream = monitor.makefile("rw")
            stream.readline()
            for command in ("qmp_capabilities", f"hostfwd_add tcp:127.0.0.1:0-:{port}", "info usernet"):
                human = {"execute": "human-monitor-command", "arguments": {"command-line": command}}
                stream.write(json.dumps(human if " " in command else {"execute": command}) + "\n")
                stream.flush()
                reply = json.loads(stream.readline())
                while "return" not in reply:
                    assert "error" not in reply, reply
                    reply = json.loads(stream.readline())
        found = re.findall(rf"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s+\S+\s+{port}\b", reply["return"])
        assert found, reply
        return int(found[-1])


@contextlib.contextmanager
def booted(folder: Path, *, systemd: bool = False, authenticates: bool = False) -> Iterator[Guest]:
    """Boot a guest, and end it at the end of the block.

    Args:
        folder: for its files.
        systemd: as its first process.
        authenticates: with a kernel that has DH-HMAC-CHAP.

    Raises:
        Unavailable: this machine cannot run one.
    """
    have = parts(authenticates=authenticates)
    serial, monitor, packages = folder / "serial.log", folder / "monitor", folder / "packages"
    _compile(packages)
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as undo:
        port = listener.getsockname()[1]
        settings = {
            "busybox": str(have.busybox),
            "init": "systemd" if systemd else "agent",
            "agent": shlex.join(
                ["/usr/bin/env", f"PYTHONPATH={path}", sys.executable, "-I", "-S", str(AGENT), str(port)]
            ),
        }
        (folder / "initramfs").write_bytes(initramfs(have, settings))
        for tag, root in (("host", Path("/")), ("layer", have.layer)):
            command = _virtiofsd(have.virtiofsd, folder / tag, root)
            undo.enter_context(_process(command, folder / f"{tag}.log"))
            _appears(folder / tag)
        qemu = undo.enter_context(_process(_qemu(folder, have.qemu, have.kernel), folder / "qemu.log"))
        listener.settimeout(1.0)
        ends = time.monotonic() + BOOT_S
        connection = None
        while connection is None:
            with contextlib.suppress(TimeoutError):
                connection = undo.enter_context(listener.accept()[0])
            if connection is None and (qemu.poll() is not None or time.monotonic() > ends):
                logs = [
                    (folder / name).read_text(errors="replace")[-2000:] for name in ("serial.log", "qemu.log")
                ]
                raise AssertionError("the guest did not boot:\n" + "\n".join(logs))
        yield Guest(connection, monitor, serial, packages)


def _compile(folder: Path) -> None:
    """Copy our packages, from where they are imported, and compile them: in the guest that takes half a minute."""
    for name in OURS:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(
            Path(spec.origin).parent, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    command = (sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(folder))
    subprocess.run(command, check=True, timeout=BOOT_S)


def _appears(path: Path) -> None:
    ends = time.monotonic() + MARGIN_S
    while not path.exists():
        assert time.monotonic() < ends, f"{path} did not appear"
        time.sleep(0.01)


def _virtiofsd(program: Path, sock: Path, root: Path) -> list[str]:
    if program.parent.name == "qemu":  # the one that was part of QEMU
        options = f"source={root},cache=always,sandbox=chroot"
        return [str(program), f"--socket-path={sock}", "-o", options]
    flags = ("--cache=always", "--sandbox=chroot")
    return [str(program), f"--socket-path={sock}", f"--shared-dir={root}", *flags]


def _qemu(folder: Path, program: Path, kernel: Path) -> list[str]:
    command = f"""{program} -nodefaults -no-user-config -display none -no-reboot
        -machine q35,memory-backend=ram -accel tcg,thread=multi -cpu max -smp 1 -m {MEMORY_MIB}
        -object memory-backend-memfd,id=ram,size={MEMORY_MIB}M,share=on -uuid {uuid.uuid4()}
        -kernel {kernel} -initrd {folder / "initramfs"} -serial file:{folder / "serial.log"}
        -chardev socket,id=host,path={folder / "host"} -device vhost-user-fs-pci,chardev=host,tag=host
        -chardev socket,id=layer,path={folder / "layer"} -device vhost-user-fs-pci,chardev=layer,tag=layer
        -netdev user,id=net -device virtio-net-pci,netdev=net,romfile=
        -qmp unix:{folder / "monitor"},server=on,wait=off"""
    return [*command.split(), "-append", "console=ttyS0 quiet mitigations=off panic=-1"]


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for the time of the block. Should this process be killed, it ends after `LIFE_S`."""
    with (
        log.open("wb") as stream,
        subprocess.Popen(
            ["timeout", "--kill-after=5", str(LIFE_S), *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
