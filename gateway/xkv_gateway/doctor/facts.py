"""Facts about this host, as far as they can be had: what cannot be read is None, not a guess."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from xkv_nvmeof.aside import Aside
from xkv_nvmeof.lookup import look_up
from xkv_process.open_files import open_files_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")

TOOL_TIMEOUT_S: Final = 3.0
CONNECT_TIMEOUT_S: Final = 3.0
FILES_TIMEOUT_S: Final = 3.0
"""A file system whose server is away keeps who looks at its files, beyond any kill."""
LOOKS_MAX: Final = 64
FILE_BYTES_MAX: Final = 1 << 20
TOOL_BYTES_MAX: Final = 8 << 20
TOOL_CHUNK_BYTES: Final = 64 << 10
KILL_GRACE_S: Final = 0.5
MODULES: Final = ("nvme_core", "nvme_fabrics", "nvme_tcp")
CAP_SYS_ADMIN: Final = 21
ADMIN_PATHS: Final = "/usr/sbin:/usr/local/sbin:/sbin:/usr/bin:/bin"
_looks: Final = Aside("doctor-look", LOOKS_MAX, "too many looks hang already")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    mtu: int | None
    up: bool
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """An attempt to reach a target."""

    host: str
    port: int
    addresses: tuple[str, ...] = ()
    """What the host stands for."""
    source: str | None = None
    """Our own address on the way there."""
    connected_ms: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file that is named in the configuration."""

    setting: str
    path: str
    exists: bool
    answers: bool = True
    """Whether its file system told anything of it in time."""
    mode: int | None = None
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found out."""

    kernel: str
    uid: int
    admin: bool | None
    """Whether this process may administrate the system (CAP_SYS_ADMIN)."""
    open_files_max: int
    memory_bytes: int | None
    memory_available_bytes: int | None
    huge_pages: tuple[int, int, int] | None
    """Total, free, and bytes of one."""
    clocksource: str | None
    wall_s: float
    clock_synchronised: bool | None
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name -> loaded, available or absent; nothing where that cannot be told."""
    fabrics_device: bool = False
    nvme_cli: str | None = None
    """Its first line about itself; empty: there is none; None: it did not say."""
    interfaces: tuple[Interface, ...] | None = None
    receive_buffer_max: int | None = None
    reaches: tuple[Reach, ...] = ()
    files: tuple[FileFact, ...] = ()
    pci_driver: str | None = None
    """Of the SSD that the target shall attach; empty: none."""
    state_dir_free_bytes: int | None = None
    state_dir_problem: str = ""


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked about, beyond the host itself."""

    reaches: tuple[tuple[str, int], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    """Setting, path."""
    pci: str | None = None
    state_dir: Path | None = None


async def gather(questions: Questions, *, root: Path = Path("/"), wall_s: float) -> Facts:
    """Find it all out, within a few seconds; changes nothing.

    Args:
        questions: what the configuration names.
        root: where /proc, /sys and /lib are looked for.
        wall_s: the time of day.
    """
    reaches = asyncio.gather(*(_reach(host, port) for host, port in questions.reaches))
    files = asyncio.gather(*(_file_soon(setting, path) for setting, path in questions.files))
    interfaces, nvme_cli, reached, looked, (free_bytes, problem) = await asyncio.gather(
        _interfaces(), _nvme_cli(), reaches, files, _state_dir_soon(questions.state_dir)
    )
    memory = _memory(root)
    kernel = os.uname().release
    return Facts(
        kernel=kernel,
        uid=os.getuid(),
        admin=_admin(root),
        open_files_max=open_files_allowed(),
        memory_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        huge_pages=_huge_pages(memory),
        clocksource=_read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        wall_s=wall_s,
        clock_synchronised=_synchronised(root),
        modules=_modules(root, kernel),
        fabrics_device=(root / "dev/nvme-fabrics").exists(),
        nvme_cli=nvme_cli,
        interfaces=interfaces,
        receive_buffer_max=_last_number(_read(root / "proc/sys/net/ipv4/tcp_rmem")),
        reaches=tuple(reached),
        files=tuple(looked),
        pci_driver=_pci_driver(root, questions.pci),
        state_dir_free_bytes=free_bytes,
        state_dir_problem=problem,
    )


# --- files ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            return stream.read(FILE_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return None


def _last_number(text: str | None) -> int | None:
    words = (text or "").split()
    return int(words[-1]) if words and words[-1].isdecimal() else None


def _memory(root: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes; counts of pages as they are."""
    found = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    return found


def _huge_pages(memory: Mapping[str, int]) -> tuple[int, int, int] | None:
    names = ("HugePages_Total", "HugePages_Free", "Hugepagesize")
    if not all(name in memory for name in names):
        return None
    return memory[names[0]], memory[names[1]], memory[names[2]]


def _admin(root: Path) -> bool | None:
    for line in (_read(root / "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            with contextlib.suppress(ValueError):
                return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1)
    return None


def _synchronised(root: Path) -> bool | None:
    """Tell what systemd's own time service says; others leave no mark that can be read without their tools."""
    if not (root / "run/systemd/timesync").is_dir():
        return None
    return (root / "run/systemd/timesync/synchronized").exists()


def _modules(root: Path, kernel: str) -> dict[str, str]:
    """Tell of each module whether it is loaded (or built in), or could be."""
    listed = "".join(
        _read(root / f"lib/modules/{kernel}" / name) or "" for name in ("modules.dep", "modules.builtin")
    )
    known = (root / "sys/module").is_dir()
    found = {}
    for name in MODULES:
        if (root / "sys/module" / name).is_dir():
            found[name] = "loaded"
        elif f"/{name.replace('_', '-')}.ko" in listed:
            found[name] = "available"
        elif known:
            found[name] = "absent"
    return found


async def in_time(work: Callable[[], T]) -> T:
    """Return what the work does, in a thread. Raises TimeoutError: it hangs; nobody waits for it any more."""
    async with asyncio.timeout(FILES_TIMEOUT_S):
        return await _looks.run(work)


async def _file_soon(setting: str, path: str) -> FileFact:
    try:
        return await in_time(lambda: _file(setting, path))
    except OSError:
        return FileFact(setting, path, exists=False, answers=False)


async def _state_dir_soon(path: Path | None) -> tuple[int | None, str]:
    try:
        return await in_time(lambda: _state_dir(path))
    except OSError:
        return None, f"the file system of {path} does not answer"


def _file(setting: str, path: str) -> FileFact:
    try:
        status = Path(path).stat()
    except OSError:
        return FileFact(setting, path, exists=False)
    return FileFact(setting, path, exists=True, mode=status.st_mode & 0o7777, owner=status.st_uid)


def _pci_driver(root: Path, pci: str | None) -> str | None:
    if pci is None:
        return None
    device = root / "sys/bus/pci/devices" / pci
    if not device.exists():
        return None
    driver = device / "driver"
    return driver.resolve().name if driver.exists() else ""


def _state_dir(path: Path | None) -> tuple[int | None, str]:
    """Return the room in it, or in the nearest directory that is there, and what is wrong with it."""
    if path is None:
        return None, ""
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not os.access(nearest, os.W_OK | os.X_OK):
        return None, f"{nearest} cannot be written to"
    try:
        return shutil.disk_usage(nearest).free, ""
    except OSError as error:
        return None, str(error.strerror)


# --- tools and connections ------------------------------------------------------------------------------------------


async def _tool(program: str, *arguments: str) -> str | None:
    """Return what a program says; empty: it is not there; None: it failed, or did not end in time."""
    path = shutil.which(program, path=ADMIN_PATHS)
    if path is None:
        return ""
    try:
        process = await asyncio.create_subprocess_exec(
            path,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    assert process.stdout is not None
    out = bytearray()
    try:
        async with asyncio.timeout(TOOL_TIMEOUT_S):
            while len(out) < TOOL_BYTES_MAX and (part := await process.stdout.read(TOOL_CHUNK_BYTES)):
                out += part
            code = await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_GRACE_S):
                await process.wait()
        return None
    return out.decode(errors="replace").strip() if code == 0 else None


async def _nvme_cli() -> str | None:
    said = await _tool("nvme", "version")
    return said.splitlines()[0] if said else said


async def _interfaces() -> tuple[Interface, ...] | None:
    said = await _tool("ip", "-j", "address")
    if not said:
        return None
    try:
        return read_interfaces(json.loads(said))
    except ValueError:
        return None


def read_interfaces(entries: Any) -> tuple[Interface, ...] | None:
    """Read `ip -j address`; None: it is not of the shape that it must have."""
    if not isinstance(entries, list):
        return None
    found = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("ifname"), str):
            continue
        mtu, flags = entry.get("mtu"), entry.get("flags")
        found.append(
            Interface(
                entry["ifname"],
                mtu if isinstance(mtu, int) else None,
                isinstance(flags, list) and "UP" in flags,
                tuple(_addresses(entry.get("addr_info"))),
            )
        )
    return tuple(found)


def _addresses(infos: Any) -> Iterable[str]:
    for info in infos if isinstance(infos, list) else ():
        if isinstance(info, dict) and isinstance(info.get("local"), str):
            yield info["local"]


async def _reach(host: str, port: int) -> Reach:
    """Resolve, look which way a packet would take, and connect."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await look_up(host, port)
    except (OSError, UnicodeError, TimeoutError):
        return Reach(host, port, problem="its name cannot be resolved")
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    source = _source(found[0][0], found[0][4])
    begin = loop.time()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(addresses[0], port)
    except TimeoutError:
        return Reach(host, port, addresses, source, problem=f"no answer within {CONNECT_TIMEOUT_S:.0f} s")
    except OSError as error:
        words = os.strerror(error.errno) if error.errno else str(error)
        return Reach(host, port, addresses, source, problem=words)
    elapsed_ms = (loop.time() - begin) * 1e3
    writer.transport.abort()
    return Reach(host, port, addresses, source, elapsed_ms)


def _source(family: int, where: Any) -> str | None:
    """Return our own address on the way there: the kernel's routes tell, without a packet."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
    return None
