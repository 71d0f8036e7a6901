"""FORMAT.md repeats the tables of the code: offsets, sizes, types, names, magics, columns, kinds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from xkv_gateway.card import heartbeat, journal_format, layout, superblock, table_file
from xkv_gateway.card.format_errors import FormatError
from xkv_gateway.card.record_codec import (
    FRAME_FIELDS,
    FRAME_HEADER,
    PER_EXTENT,
    PER_OBJECT,
    RecordKind,
)
from xkv_gateway.card.structure import FORMAT_VERSION, Structure
from xkv_gateway.card.superblock import DIGEST_SECRET_BYTES
from xkv_gateway.card.tables import TABLES, Table
from xkv_gateway.core.records import DeleteCause

PAGE: Final = (Path(__file__).parents[2] / "gateway" / "FORMAT.md").read_text()
STRUCTURES: Final = (
    superblock.SUPERBLOCK,
    heartbeat.HEARTBEAT,
    journal_format.BATCH,
    table_file.FILE_HEADER,
    table_file.CHUNK,
    table_file.CLOSING,
)


def section(heading: str) -> str:
    """The text from a heading to the next one."""
    _, found, rest = PAGE.partition(f"\n{heading}\n")
    assert found, heading
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, heads and rules left out."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line]
        for line in lines
        if line[0].strip() not in {"offset", "column", "kind"}
    ]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.name)
def test_the_byte_table_of_a_structure_is_that_of_the_code(structure: Structure) -> None:
    text = section(f"### `{structure.name}` ({structure.size_bytes} bytes)")
    found = [tuple(cells[:4]) for cells in rows(text)]
    expected = [
        (str(field.offset), str(field.size), field.type, f"`{field.name}`" if field.name else "reserved")
        for field in structure.fields
    ]
    assert found == expected
    assert all(len(cells) == 5 and cells[4] for cells in rows(text)), "each field says what it protects from"
    assert f"`{structure.magic.decode()}`" in text
    assert structure.fields[-1].offset + structure.fields[-1].size == structure.size_bytes


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_the_columns_of_a_table_are_those_of_the_code(table: Table) -> None:
    found = [tuple(cells[:2]) for cells in rows(section(f"#### `{table.name}` (table {table.ident})"))]
    assert found == [(f"`{column.name}`", f"`{column.dtype}`") for column in table.columns]


def test_the_frames_of_records_are_those_of_the_code() -> None:
    cells = rows(section("### `record`"))
    fields = cells[: len(FRAME_FIELDS)]
    assert [(row[2], row[3]) for row in fields] == [(type_, f"`{name}`") for type_, name in FRAME_FIELDS]
    assert sum(int(row[1]) for row in fields) == FRAME_HEADER.size
    kinds = cells[len(FRAME_FIELDS) :]
    assert [(int(row[0]), row[1]) for row in kinds] == [(kind.value, kind.name) for kind in RecordKind]
    for row, kind in zip(kinds, RecordKind, strict=True):
        if kind in PER_OBJECT:
            arrays = [*PER_OBJECT[kind], *(PER_EXTENT if kind is RecordKind.PUT else ())]
            named = re.findall(r"`(\w+)` `([<\w]+)`", row[2])
            assert named[: len(arrays)] == list(arrays)
    causes = ", ".join(f"{cause.value}" for cause in DeleteCause)
    assert causes == "0, 1, 2, 3, 4, 5, 6", "the page lists the causes"


def test_the_regions_are_named_in_their_order() -> None:
    text = section("## Regions")
    places = [text.index(f"| {name} |") for name in ("journal", "checkpoint A, B", "ledger A, B", "data")]
    assert places == sorted(places)
    assert layout.REGION_NAMES == (
        "journal", "checkpoint_a", "checkpoint_b", "ledger_a", "ledger_b", "data",
    )  # fmt: skip


def test_the_version_is_listed_as_the_last_one() -> None:
    versions = re.findall(r"^\| (\d+) \| .+ \|$", section("## Versions and features"), re.MULTILINE)
    assert int(versions[-1]) == FORMAT_VERSION


def test_the_fault_codes_that_the_page_names_exist() -> None:
    codes = {cls.code for cls in FormatError.__subclasses__()}
    assert {"wrong_namespace", "geometry_changed"} <= codes
    assert (
        next(f.size for f in superblock.SUPERBLOCK.fields if f.name == "digest_secret") == DIGEST_SECRET_BYTES
    )
