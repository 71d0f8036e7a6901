"""The wheel is whole: a fresh environment has the trace, the units and the commands."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from xkv_gateway.cli.systemd import EXAMPLES, MANAGED

PROJECT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_in_a_fresh_environment_installs_its_units(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, check=True, capture_output=True).stdout
    files = [name for name in tracked.decode().split("\0") if name]
    copy = ["tar", "--create", "--no-recursion", "--null", "--files-from=-"]
    packed = subprocess.run(
        copy, cwd=PROJECT, input="\0".join(files).encode(), check=True, capture_output=True
    )
    source.mkdir()
    subprocess.run(["tar", "--extract"], cwd=source, input=packed.stdout, check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
    subprocess.run(
        [fresh / "bin" / "pip", "install", "--quiet", "--no-deps", str(wheel)], env=environment, check=True
    )
    # The dependencies are those of this environment, behind everything that the wheel brings.
    (packages,) = fresh.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(
        f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    )
    root = tmp_path / "root"
    install = [fresh / "bin" / "xkv-gateway", "systemd", "install", "--root", str(root)]
    subprocess.run(install, env=environment, check=True)
    assert all((root / path).is_file() for path in (*MANAGED.values(), *EXAMPLES.values()))
    assert str(fresh / "bin" / "xkv-gateway") in (root / MANAGED["xkv-gateway.service"]).read_text()
    assert str(fresh / "bin" / "xkv-frontend") in (root / MANAGED["xkv-frontend.service"]).read_text()
    where = [
        fresh / "bin" / "python",
        "-c",
        "import xkv_gateway.replay, pathlib; print(xkv_gateway.__file__)",
    ]
    found = subprocess.run(where, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    assert found.startswith(str(fresh))
    assert (Path(found).parent / "data" / "conversations.jsonl.gz").stat().st_size > 1000
