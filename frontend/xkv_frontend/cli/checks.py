"""`xkv-frontend verify` and `xkv-frontend timing`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from xkv_frontend.clock import entropy, monotonic_ns
from xkv_frontend.core.stats import Conclusion, conclude, estimate
from xkv_frontend.core.verdict import EXPECTED, Observation, Verdict, judge
from xkv_frontend.errors import ConfigError, ExitCode
from xkv_frontend.plot import check_plotting, draw
from xkv_frontend.probing import RESTART_S_DEFAULT
from xkv_frontend.timing import PROBES_DEFAULT, PROBES_MAX_DEFAULT, TimingOptions, probes_in_all, study
from xkv_frontend.verify import LINES_DEFAULT, VerifyOptions, observe

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE = click.Path(path_type=Path, dir_okay=False)
VERDICTS = {
    Verdict.ISOLATED: ExitCode.OK,
    Verdict.BROKEN: ExitCode.FAILED,
    Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}
CONCLUSIONS = {
    Conclusion.HIDDEN: ExitCode.OK,
    Conclusion.VISIBLE: ExitCode.FAILED,
    Conclusion.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--front", required=True, metavar="URL", help="The front end."),
        click.option(
            "--key-a",
            required=True,
            metavar="KEY",
            show_envvar=True,
            help="Tenant A's key. Keys are better in variables, which others on the machine do not see.",
        ),
        click.option("--key-b", required=True, metavar="KEY", show_envvar=True, help="Tenant B's key."),
        click.option(
            "--key-a2", required=True, metavar="KEY", show_envvar=True, help="Another key of tenant A."
        ),
        click.option("--model", metavar="NAME", help="Default: the first that is served."),
        click.option(
            "--restart-command",
            metavar="CMD",
            help="Restarts vLLM, not the gateway; ends when the old one is gone.",
        ),
        click.option(
            "--restart-timeout", default=RESTART_S_DEFAULT, show_default=True, type=click.FloatRange(1, 86400)
        ),
        click.option("--json", "json_file", type=_FILE, help="Write everything that was seen."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ConfigError(f"{text!r} is not an http URL")
    return text.rstrip("/")


@click.command()
@_common
@click.option(
    "--vllm",
    metavar="URL",
    help="vLLM itself, to wait for its /health; default: its models, through the front end.",
)
@click.option("--lines", default=LINES_DEFAULT, show_default=True, type=click.IntRange(50, 1_000_000))
@click.option(
    "--run-id",
    metavar="TEXT",
    help="Stands before the prompt; default: random, so that every run is new. '': nothing.",
)
@click.option("--settle-seconds", default=3.0, show_default=True, type=click.FloatRange(0, 3600),
              help="For writing to the card, before the restart.")  # fmt: skip
def verify(**given: Any) -> ExitCode:
    """Check that two tenants are kept apart and that one tenant keeps its cache.

    By the counts of cached tokens that vLLM reports (--enable-prompt-tokens-details): A asks a new prompt, A asks again, A's
    second key asks, B asks; then vLLM is restarted, and A and B ask once more. Exit code: 0 isolated, 1 broken, 8 inconclusive.
    """
    options = VerifyOptions(
        _url(given["front"]),
        given["key_a"],
        given["key_b"],
        given["key_a2"],
        entropy(8).hex() if given["run_id"] is None else given["run_id"],
        given["lines"],
        given["model"],
        given["restart_command"],
        f"{_url(given['vllm'])}/health" if given["vllm"] else None,
        given["restart_timeout"],
        given["settle_seconds"],
    )
    console = Console(highlight=False, stderr=True)
    seen = asyncio.run(observe(options, monotonic_ns, lambda one: console.print(_line(one), style="dim")))
    judgement = judge(seen)
    table = Table("request", "prompt tokens", "cached tokens", "expected", "")
    for one in seen:
        fine = {True: "ok", False: "NOT as expected", None: "not told"}[one.as_expected]
        table.add_row(
            one.step.value, _text(one.prompt_tokens), _text(one.cached_tokens), EXPECTED[one.step].value, fine
        )
    out = Console(highlight=False)
    out.print(table)
    out.print(
        f"Verdict: {judgement.verdict.value}. " + "; ".join(judgement.sentences) + ".",
        soft_wrap=True,
        markup=False,
    )
    if given["json_file"]:
        document = {
            "verdict": judgement.verdict,
            "reasons": judgement.sentences,
            "observations": [asdict(one) for one in seen],
        }
        _write(given["json_file"], document)
    return VERDICTS[judgement.verdict]


def _line(one: Observation) -> str:
    return f"{one.step.value}: {_text(one.cached_tokens)} of {_text(one.prompt_tokens)} tokens cached"


def _text(count: int | None) -> str:
    return "not told" if count is None else str(count)


@click.command()
@_common
@click.option(
    "--vllm",
    required=True,
    metavar="URL",
    help="vLLM itself, with VLLM_SERVER_DEV_MODE=1 for the time of the study.",
)
@click.option(
    "--probes",
    default=PROBES_DEFAULT,
    show_default=True,
    type=click.IntRange(5, 100_000),
    help="A pair of times for each arm.",
)
@click.option(
    "--probes-max",
    default=PROBES_MAX_DEFAULT,
    show_default=True,
    type=click.IntRange(5, 100_000),
    help="For another tenant's arms, which go on while times scatter too much for a statement.",
)
@click.option(
    "--lines", default=300, show_default=True, type=click.IntRange(10, 1_000_000), help="Length of a prompt."
)
@click.option("--settle-seconds", default=0.5, show_default=True, type=click.FloatRange(0, 3600),
              help="For writing the victim's prompt to the card.")  # fmt: skip
@click.option("--plot", type=_FILE, help="Draw the distributions into a PNG (needs matplotlib).")
def timing(**given: Any) -> ExitCode:
    """Study whether the time to the first token tells what others have asked.

    Exit code: 0 other tenants cannot tell, 1 they can, 8 inconclusive (also: nobody can, so that the study sees nothing).
    """
    if given["plot"]:
        check_plotting()
    options = TimingOptions(
        _url(given["front"]),
        _url(given["vllm"]),
        given["key_a"],
        given["key_b"],
        given["key_a2"],
        given["model"],
        given["probes"],
        given["probes_max"],
        given["lines"],
        given["settle_seconds"],
        given["restart_command"],
        given["restart_timeout"],
    )
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("probes", total=probes_in_all(options))
        samples = asyncio.run(
            study(options, monotonic_ns, entropy, lambda total: progress.update(bar, advance=1, total=total))
        )
    random = np.random.default_rng()
    estimates = {arm: estimate(of_arm, random) for arm, of_arm in samples.items()}
    report = conclude(estimates)
    out = Console(highlight=False)
    for sentence in report.sentences:
        out.print(sentence, soft_wrap=True, markup=False)
    if given["plot"]:
        draw(samples, estimates, given["plot"])
    if given["json_file"]:
        document = {
            "conclusion": report.conclusion,
            "arms": {
                arm: {**asdict(found), "finding": found.finding, "samples": asdict(samples[arm])}
                for arm, found in estimates.items()
            },
        }
        _write(given["json_file"], document)
    return CONCLUSIONS[report.conclusion]


def _write(path: Path, document: Any) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
