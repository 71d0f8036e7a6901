from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.gateway import Gateway, serving
from tests.vllm.environment import interpreter, why_not

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

Models = Callable[[str], Path]
BUILD_S = 900


@pytest.fixture(autouse=True)
def vllm_is_here(request: pytest.FixtureRequest) -> None:
    reason = why_not() if request.node.get_closest_marker("vllm") else None
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function from the kind of a model to its folder; each is built once."""

    def folder(kind: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"model-{kind}"
        if not path.exists():
            program = Path(__file__).with_name("models.py")
            subprocess.run(
                [interpreter(), program, kind, path], check=True, capture_output=True, timeout=BUILD_S
            )
        return path

    return folder


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path: Unix sockets below it must fit into 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="xkv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def gateway(home: Path) -> AsyncIterator[Gateway]:
    async with serving(home / "state") as one:
        yield one
