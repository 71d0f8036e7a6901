"""The card format is pure: bytes in, values out. No I/O, clock, randomness, event loop, logging, and no shell."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

from xkv_gateway import card

FOLDER: Final = Path(card.__file__).parent
PURE: Final = (
    "format_errors", "structure", "tables", "layout", "superblock", "heartbeat",
    "record_codec", "journal_format", "journal_scan", "table_file", "table_read", "fsck", "marks",
)  # fmt: skip
ALLOWED: Final = {
    "__future__", "collections.abc", "crc32c", "dataclasses", "enum", "numpy", "numpy.typing", "re", "struct", "typing",
    "uuid",  # as the text of 16 bytes
}  # fmt: skip


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_imports_nothing_but_pure_ones(name: str) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    ours = {module for module in imported if module.startswith("xkv_")}
    assert imported - ours <= ALLOWED
    assert ours <= {f"xkv_gateway.card.{pure}" for pure in PURE} | {
        "xkv_gateway.card",
        "xkv_gateway.core.records",
        "xkv_gateway.core.tenancy",
        "xkv_gateway.core.types",
    }
