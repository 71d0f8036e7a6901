"""What a guest is made of: QEMU of this machine, and Debian packages, downloaded by name and unpacked into a cache.

The guest's root is this machine's own, seen through virtiofs, under a *layer*: the packages that apt would have to install for
what the tests need. Nothing is installed here, and nothing is written outside of `$XDG_CACHE_HOME/xkv-gateway/guest`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NEEDED: Final = ("nvme-cli", "systemd", "udev", "e2fsprogs", "iproute2")
"""What the guest's programs come from."""
BUSYBOX: Final = "busybox-static"
KERNELS: Final = {"x86_64": "linux-image-cloud-amd64"}
QEMU: Final = "qemu-system-x86_64"
VIRTIOFSD: Final = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
AUTHENTICATES: Final = ("CONFIG_NVME_TARGET_AUTH=y", "CONFIG_NVME_HOST_AUTH=y")
"""What the kernel's configuration says where its target and its initiator have DH-HMAC-CHAP."""
NEXT_RELEASE: Final = "trixie"
"""The first one of Debian whose kernel has it."""
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
MERGED: Final = ("bin", "sbin", "lib", "lib64")
DOWNLOAD_TIMEOUT_S: Final = 300


class Unavailable(Exception):  # noqa: N818 - not an error of ours
    """This machine cannot run a guest; the message says what is missing."""


@dataclass(frozen=True)
class Parts:
    """Where everything lies."""

    qemu: Path
    virtiofsd: Path
    kernel: Path
    modules: Path
    """`/lib/modules/VERSION` of the kernel's package."""
    busybox: Path
    layer: Path
    """Unpacked packages, to be put over this machine's root."""


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Unavailable(f"{' '.join(command[:2])} failed: {last[0] if last else done.returncode}")
    return done.stdout


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "xkv-gateway" / "guest"


def _program(name: str, *places: str) -> Path:
    found = shutil.which(name) or next((place for place in places if Path(place).exists()), None)
    if found is None:
        raise Unavailable(f"{name} is not installed")
    return Path(found)


def _kernel_package(*options: str) -> str:
    """Return the package that the newest cloud kernel is in, as NAME=VERSION; `options` are those of apt."""
    meta = KERNELS.get(platform.machine())
    if meta is None:
        raise Unavailable(f"no guest for {platform.machine()} yet")
    found = re.search(r"Depends: (linux-image-\S+)", _run("apt-cache", *options, "depends", meta))
    if found is None:
        raise Unavailable(f"apt knows no {meta}: run apt-get update")
    return _versioned(found[1], *options)


def _versioned(name: str, *options: str) -> str:
    found = re.search(r"Candidate: (\S+)", _run("apt-cache", *options, "policy", name))
    if found is None or found[1] == "(none)":
        raise Unavailable(f"apt knows no {name}: run apt-get update")
    return f"{name}={found[1]}"


def _missing() -> list[str]:
    """Return what apt would install or upgrade for NEEDED, as NAME=VERSION."""
    plan = _run("apt-get", "install", "--simulate", "--no-install-recommends", *NEEDED)
    return [
        f"{name}={version}"
        for name, version in re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", plan, re.MULTILINE)
    ]


def _unpack(packages: list[str], target: Path, *options: str) -> None:
    """Download the packages and unpack them into `target`, in the layout in which /bin is /usr/bin."""
    debs = target.with_suffix(".debs")
    debs.mkdir(parents=True)
    # apt's own user may not see the cache of another one.
    _run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *options, *packages, cwd=debs)
    target.mkdir()
    for name in MERGED:
        (target / "usr" / name).mkdir(parents=True)
        (target / name).symlink_to(f"usr/{name}")
    for deb in sorted(debs.glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE) as tar:
            subprocess.run(
                ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", str(target)],
                stdin=tar.stdout,
                check=True,
                timeout=DOWNLOAD_TIMEOUT_S,
            )
        if tar.returncode:
            raise Unavailable(f"{deb.name} cannot be unpacked")
    shutil.rmtree(debs)


def _cached(cache: Path, packages: list[str]) -> Path:
    """Return the folder of these packages, made on the first call; what another set left behind is removed."""
    kind = packages[0].partition("=")[0].rpartition("-")[0] if len(packages) == 1 else "layer"
    key = hashlib.sha256("\n".join(sorted(packages)).encode()).hexdigest()[:16]
    target = cache / f"{kind}-{key}"
    if not target.exists():
        building = cache / f"{target.name}.new"
        for old in (building, building.with_suffix(".debs"), *cache.glob(f"{kind}-????????????????")):
            shutil.rmtree(old, ignore_errors=True)
        if packages:
            _unpack(packages, building)
        else:
            building.mkdir()
        building.rename(target)
    return target


def _authenticates(image: Path) -> bool:
    """Return whether the unpacked kernel has DH-HMAC-CHAP on both sides."""
    (config,) = (image / "boot").glob("config-*")
    return set(AUTHENTICATES) <= set(config.read_text().splitlines())


def _newer_kernel(cache: Path) -> Path:
    """Return the unpacked kernel of Debian's next release, by lists of packages of their own: nothing of apt's is touched."""
    target = cache / "kernel-authenticates"
    if not target.exists():
        sources = _run("apt-get", "indextargets", "--format", "$(ORIGIN) $(COMPONENT) $(REPO_URI)")
        found = re.search(r"^Debian main (\S+/debian/?)$", sources, re.MULTILINE)
        if found is None or not Path(KEYRING).exists():
            raise Unavailable("apt names no mirror of Debian to get a newer kernel from")
        apt = cache / "apt"
        shutil.rmtree(apt, ignore_errors=True)
        for folder in ("lists/partial", "cache/archives/partial"):
            (apt / folder).mkdir(parents=True)
        (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {found[1]} {NEXT_RELEASE} main\n")
        places = {
            "Dir::Etc::sourcelist": apt / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": apt / "lists",
            "Dir::Cache": apt / "cache",
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "root",
        }
        options = [word for name, value in places.items() for word in ("-o", f"{name}={value}")]
        _run("apt-get", *options, "update", "-qq")
        building = cache / f"{target.name}.new"
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(building.with_suffix(".debs"), ignore_errors=True)
        _unpack([_kernel_package(*options)], building, *options)
        if not _authenticates(building):
            raise Unavailable(f"the kernel of {NEXT_RELEASE} has no DH-HMAC-CHAP")
        building.rename(target)
        shutil.rmtree(apt)
    return target


@functools.cache
def parts(*, authenticates: bool = False) -> Parts:
    """Return what a guest is made of; downloads what is not in the cache.

    Args:
        authenticates: with a kernel that has DH-HMAC-CHAP.

    Raises:
        Unavailable: something cannot be had here.
    """
    qemu, virtiofsd = _program(QEMU), _program("virtiofsd", *VIRTIOFSD)
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "tar"):
        _program(tool)
    if os.geteuid() != 0:
        raise Unavailable("virtiofsd shows all of this machine's files only to root")
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        image = _cached(cache, [_kernel_package()])
        if authenticates and not _authenticates(image):
            image = _newer_kernel(cache)
        busybox = _cached(cache, [_versioned(BUSYBOX)])
        layer = _cached(cache, _missing())
    (modules,) = (image / "usr/lib/modules").iterdir()
    (kernel,) = (image / "boot").glob("vmlinuz-*")
    return Parts(qemu, virtiofsd, kernel, modules, busybox / "usr/bin/busybox", layer)
