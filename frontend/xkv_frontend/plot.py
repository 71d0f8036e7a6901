"""The picture of a timing study: for each arm, how the times on the victim's prompt and on a fresh one are distributed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from xkv_frontend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from xkv_frontend.core.stats import Arm, Estimate, Samples

WIDTH_IN: Final = 9.0
ROW_IN: Final = 1.9
KNOWN_COLOUR: Final = "tab:red"
FRESH_COLOUR: Final = "tab:blue"


def check_plotting() -> None:
    """Say at once, not after an hour of measuring, that no picture can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        advice = "pip install matplotlib, or leave --plot out."
        raise ConfigError("a picture needs matplotlib", advice=advice)


def draw(samples: Mapping[Arm, Samples], estimates: Mapping[Arm, Estimate], path: Path) -> None:
    """Write a PNG: one row of cumulative distributions for each arm.

    Raises:
        ConfigError: The file cannot be written, or matplotlib is not there.
    """
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package

    figure = Figure(figsize=(WIDTH_IN, ROW_IN * len(samples) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(samples), 1, squeeze=False, sharex=True)
    for row, (arm, of_arm) in zip(rows[:, 0], samples.items(), strict=True):
        found = estimates[arm]
        for label, values, colour in (
            ("victim's prompt", of_arm.known_ms, KNOWN_COLOUR),
            ("fresh prompt", of_arm.fresh_ms, FRESH_COLOUR),
        ):
            row.ecdf(values, label=label, color=colour)
        row.set_title(
            f"{arm.value}: difference of medians {found.difference_ms:.1f} ms "
            f"[{found.low_ms:.1f}, {found.high_ms:.1f}], {found.finding.value}",
            fontsize="medium",
        )
        row.set_ylabel("share of probes")
    rows[0, 0].legend()
    rows[-1, 0].set_xlabel("time to first token (ms)")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
