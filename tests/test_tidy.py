"""The rules of the code base that a tool can check: sizes, boundaries, words, documents that repeat a table."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from xkv_gateway.errors import ExitCode
from xkv_rpc.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[1]
SOURCES: Final = ("gateway", "rpc", "nvmeof", "frontend", "connector", "tests", "bench")
MODULE_LINES_MAX: Final = 400
FUNCTION_LINES_MAX: Final = 60
CLASS_METHODS_MAX: Final = 20

BROAD_EXCEPT_ALLOWED: Final = {
    ("gateway/xkv_process/command.py", "_run"),
    ("gateway/xkv_gateway/service/admin.py", "__call__"),
    ("gateway/xkv_gateway/service/control.py", "_start"),
    ("gateway/xkv_gateway/service/control.py", "_guarded"),
    ("rpc/xkv_rpc/server.py", "_dispatch"),
    ("frontend/xkv_frontend/front.py", "__call__"),
    ("connector/xkv_vllm_connector/worker.py", "_serve"),
    ("nvmeof/xkv_nvmeof/aside.py", "run"),
    ("nvmeof/xkv_nvmeof/aside.py", "work"),
}
"""The task boundaries: the command line, an admin request, a control request (as the server and the service see it), a thread's work."""

BANNED_WORDS: Final = re.compile(r"\bTODO\b|\bFIXME\b|\bXXX\b|/work/|/opt/|\bclaude\b", re.IGNORECASE)
FOREIGN_THREAD: Final = re.compile(r"\b[\w.-]+/[\w.-]+#\d+")


def tracked(*suffixes: str) -> list[Path]:
    """Return the files of the project (also those not committed yet), without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def modules(*, word: str = "", tests: bool = True) -> Iterator[tuple[str, str, ast.Module]]:
    """Return name, text and tree of the modules that hold the word, with or without those of the tests."""
    for path in tracked(".py"):
        name = str(path.relative_to(ROOT))
        if name.startswith(SOURCES) and (tests or not name.startswith("tests")):
            text = path.read_text()
            if word in text:
                yield name, text, ast.parse(text)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_modules_functions_and_classes_stay_small() -> None:
    found = []
    for name, text, tree in modules():
        lines = len(text.splitlines())
        if lines > MODULE_LINES_MAX:
            found.append(f"{name}: {lines} lines")
        for function in functions(tree):
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > FUNCTION_LINES_MAX:
                found.append(f"{name}: {function.name} has {length} lines")
        # A fake has as many methods as the contract that it stands for.
        found += [
            f"{name}: {node.name} has {_methods(node)} methods"
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and not name.startswith("tests")
            and _methods(node) > CLASS_METHODS_MAX
        ]
    assert not found


def _methods(node: ast.ClassDef) -> int:
    """Count the methods; properties are read like fields, so they do not count."""
    return sum(
        isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any(getattr(decorator, "id", "") == "property" for decorator in item.decorator_list)
        for item in node.body
    )


def test_nothing_is_global() -> None:
    found = modules(word="global ")
    assert not [name for name, _, tree in found if any(isinstance(n, ast.Global) for n in ast.walk(tree))]


def test_broad_excepts_stand_at_the_task_boundaries_only() -> None:
    """One that ends with a bare `raise` cleans up and hides nothing: it may stand anywhere."""
    found = {
        (name, function.name)
        for name, _, tree in modules(word="except", tests=False)
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _reraises(node)
    }
    assert found <= BROAD_EXCEPT_ALLOWED


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in {"Exception", "BaseException"} for kind in kinds)


def _reraises(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_no_leftovers_paths_of_one_machine_or_threads_of_others() -> None:
    found = []
    for path in tracked(".py", ".md", ".toml", ".sh", ".yml", ".service", ""):
        if path == Path(__file__) or (path.suffix == "" and path.name not in {"Makefile", "run"}):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if BANNED_WORDS.search(line) or FOREIGN_THREAD.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_pages_lead_somewhere() -> None:
    broken = []
    for page in tracked(".md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not link.startswith("https://") and not (
                target.exists() and (not anchor or anchor in anchors(target))
            ):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_every_exit_code_is_documented() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {int(code) for code in rows} == {int(code) for code in ExitCode}


def test_every_error_code_is_documented() -> None:
    page = (ROOT / "rpc" / "PROTOCOL.md").read_text()
    assert not [code.value for code in ErrorCode if f"`{code.value}`" not in page]


def test_scripts_can_be_executed() -> None:
    assert not [
        path.name for path in (ROOT / ".ci/run", ROOT / "bench/demo.sh") if not path.stat().st_mode & 0o111
    ]
