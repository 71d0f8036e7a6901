"""`python -m tests.vllm.environment [--lmcache]`: makes the environment in which vLLM runs, and installs this project there.

It is `.venv-vllm`, or the one that XKV_VLLM_VENV names. Where the CPU build of torch cannot be had, it writes down why, and the
tests are skipped with that reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
LMCACHE_REQUIREMENTS: Final = Path(__file__).with_name("requirements-lmcache.txt")
INSTALL_S: Final = 1800


def folder() -> Path:
    """Where the environment is, or will be."""
    return Path(os.environ.get("XKV_VLLM_VENV") or ROOT / ".venv-vllm").absolute()


def interpreter() -> Path:
    return folder() / "bin" / "python"


def why_not() -> str | None:
    """Return why vLLM cannot run here; None: it can."""
    unavailable = folder() / "unavailable"
    if unavailable.exists():
        return unavailable.read_text()
    if not (folder() / "xkv-installed").exists():
        return f"there is no vLLM in {folder().name}: `make test-vllm` installs it"
    return None


def lmcache_interpreter() -> Path:
    """Return the interpreter that has LMCache besides everything that `interpreter` has."""
    return folder() / "lmcache" / "bin" / "python"


def why_no_lmcache() -> str | None:
    """Return why LMCache cannot run here; None: it can."""
    if (folder() / "lmcache" / "installed").exists():
        return None
    return f"there is no LMCache in {folder().name}: `make test-vllm` installs it"


def pins() -> dict[str, str]:
    """Return the versions in the requirements file, by normalised name."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", REQUIREMENTS.read_text(), re.MULTILINE)
    return {normal(name): version for name, version in found}


def normal(name: str) -> str:
    """Return the name of a distribution as all spellings of it compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*arguments: str, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    pip = [str(python or interpreter()), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    return subprocess.run(
        [*pip, "install", *arguments],
        text=True,
        stderr=subprocess.PIPE,
        check=False,
        timeout=INSTALL_S,
        cwd=ROOT,
    )


def _newer(stamp: Path, source: Path) -> bool:
    return not stamp.exists() or stamp.stat().st_mtime < source.stat().st_mtime


def _lmcache() -> int:
    """Make an environment on top of the other one: LMCache pins other versions of much that vLLM needs."""
    stamp = folder() / "lmcache" / "installed"
    if not _newer(stamp, LMCACHE_REQUIREMENTS):
        return 0
    subprocess.run([sys.executable, "-m", "venv", str(folder() / "lmcache")], check=True)
    below = next((folder() / "lib").glob("python*")) / "site-packages"
    own = next((folder() / "lmcache" / "lib").glob("python*")) / "site-packages"
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    done = _pip("--no-deps", "-r", str(LMCACHE_REQUIREMENTS), python=lmcache_interpreter())
    if done.returncode:
        print(done.stderr, file=sys.stderr)  # noqa: T201 - a command
        return done.returncode
    stamp.touch()
    return 0


def main() -> int:
    """Return the exit code: 0 also where torch cannot be had."""
    ready, ours, unavailable = (
        folder() / name for name in ("vllm-installed", "xkv-installed", "unavailable")
    )
    unavailable.unlink(missing_ok=True)
    made_by_us = "XKV_VLLM_VENV" not in os.environ
    if made_by_us and not interpreter().exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder())], check=True)
    if made_by_us and _newer(ready, REQUIREMENTS):
        torch = f"torch=={pins()['torch']}"
        done = _pip("--no-deps", torch)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            unavailable.write_text(f"the CPU build {torch} cannot be had here: {last}")
            print(f"vLLM's tests are skipped: {unavailable.read_text()}")  # noqa: T201 - a command
            return 0
        done = _pip("--no-deps", "-r", str(REQUIREMENTS))
        if done.returncode:
            print(done.stderr, file=sys.stderr)  # noqa: T201 - a command
            return done.returncode
        ready.touch()
    if _newer(ours, ROOT / "pyproject.toml"):
        done = _pip("--editable", str(ROOT))
        if done.returncode:
            print(done.stderr, file=sys.stderr)  # noqa: T201 - a command
            return done.returncode
        ours.touch()
    return _lmcache() if "--lmcache" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
