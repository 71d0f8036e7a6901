"""What every test relies on."""

from __future__ import annotations

# Imported before any test runs: CPython 3.11 sometimes fails to compile a large module deep inside a running test
# ("AST constructor recursion depth mismatch").
import hypothesis.strategies  # noqa: F401
