from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .machine import booted
from .packages import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Guest


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """One guest for all tests that ask for it: each leaves it as it was."""
    try:
        with booted(tmp_path_factory.mktemp("guest")) as machine:
            yield machine
    except Unavailable as error:
        pytest.skip(f"no guest: {error}")
