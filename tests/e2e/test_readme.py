"""What the README shows is run."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
from pathlib import Path

from tests.e2e.gateway import HANG_S, environment, serving

README = Path(__file__).parents[2] / "README.md"


async def test_the_client_of_the_readme_prints_what_stands_there(home: Path) -> None:
    example = re.search(r"^    from xkv_rpc import .*?(?=^\S)", README.read_text(), re.MULTILINE | re.DOTALL)
    assert example
    program = textwrap.dedent(example[0])
    promised = re.findall(r"print\(.*\) +# (.+)$", program, re.MULTILINE)
    assert promised
    assert program.count(':5557")') == 1
    async with serving(home / "state") as gateway:
        # As patient as a busy machine needs it.
        call = f':{gateway.control_port}", __import__("tests.e2e.gateway").e2e.gateway.PATIENT)'
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program.replace(':5557")', call)),
            env=environment(home),
            cwd=README.parent,
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(HANG_S):
            output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.decode().splitlines() == promised
