"""SUBSET.md says what the controller side does: its tables are compared with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import xkv_nvmeof
from tests.nvmeof.card_bench import CardBench
from xkv_nvmeof import builders
from xkv_nvmeof.command import SubmissionEntry
from xkv_nvmeof.softcard import store
from xkv_nvmeof.spec import Cns, LogPageId, Status

PACKAGE = Path(xkv_nvmeof.__file__).parent
TEXT = (PACKAGE.parent / "SUBSET.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in TEXT.splitlines() if "|" in line]


def row(*starts: str) -> str:
    (found,) = [" ".join(cells) for cells in ROWS if tuple(cells[: len(starts)]) == starts]
    return found


def hexadecimal(text: str) -> set[int]:
    return {int(number, 16) for number in re.findall(r"\b([0-9A-F]{2})h", text)}


def test_every_status_named_exists() -> None:
    named = set(re.findall(r"`([A-Z][A-Z_]{6,})`", TEXT)) - {"XKVSOFTC"}
    assert named
    assert named <= set(Status.__members__)


def test_every_module_named_exists() -> None:
    named = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|", TEXT, re.MULTILINE)
    modules = {name for pair in named for name in pair if name.startswith(("controller", "discovery"))}
    assert modules
    existing = {path.stem for path in [*PACKAGE.glob("controller*.py"), PACKAGE / "discovery.py"]}
    assert modules == existing - {"controller_types"}


def test_the_identify_structures_named_are_those_that_are_answered() -> None:
    admin = CardBench().admin()
    answered = {
        cns
        for cns in range(0x30)
        if admin.status_of_data(builders.identify(4, cns, nsid=1)) is Status.SUCCESS
    }
    assert answered == hexadecimal(row("admin", "Identify"))
    assert Cns.IO_CONTROLLER in answered


def test_the_log_pages_named_are_those_that_are_answered() -> None:
    admin = CardBench().admin()
    answered = {
        page
        for page in range(0x100)
        if admin.status_of_data(builders.get_log_page(4, page, 64)) is Status.SUCCESS
    }
    assert answered == hexadecimal(row("admin", "Get Log Page"))
    assert LogPageId.DISCOVERY not in answered


def test_the_features_named_are_those_that_are_answered() -> None:
    admin = CardBench().admin()
    answered = {
        feature
        for feature in range(0x100)
        if admin.status(builders.get_features(4, feature, select=3)) is Status.SUCCESS
    }
    assert answered == hexadecimal(row("admin", "Set Features, Get Features"))


def test_the_io_commands_that_exist_are_those_named_and_the_fabrics_ones() -> None:
    bench = CardBench()
    queue = bench.queue(bench.admin())
    known = {
        opcode
        for opcode in range(0x7F)
        if queue.status(SubmissionEntry(opcode, 4, 9)) is not Status.INVALID_OPCODE
    }
    assert known == {0x00, 0x01, 0x02, 0x08, 0x09, 0x0D, 0x0E, 0x11, 0x15}


def test_the_trailer_table_is_the_one_in_the_code() -> None:
    in_code = re.findall(r"^    (\d+) +\| (\d+) +\| (\S+) +\| (.+)$", str(store.__doc__), re.MULTILINE)
    documented = [cells for cells in ROWS if cells[0].isdecimal() and len(cells) == 4]
    assert [[a, b, c, d.strip()] for a, b, c, d in in_code] == [
        [a, b, c, d.replace("`XKVSOFTC`", '"XKVSOFTC"')] for a, b, c, d in documented
    ]
    ends = [int(offset) + int(size) for offset, size, *_ in documented]
    assert [int(cells[0]) for cells in documented[1:]] == ends[:-1]
    assert ends[-1] == store.TRAILER_BYTES


def test_the_controller_side_is_pure() -> None:
    banned = {"asyncio", "time", "random", "secrets", "os", "socket", "logging", "threading", "uvloop"}
    names = ("spec", "command", "builders", "identify", "logpages", "discovery")
    for path in [*PACKAGE.glob("controller*.py"), *(PACKAGE / f"{name}.py" for name in names)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert str(node.module).split(".")[0] not in banned, path
