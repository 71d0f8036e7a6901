from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.frontend.harness import KEY_A, KEY_A2, KEY_B, SALTER, Running, running_front
from tests.frontend.test_verify import SECRET, SaltSwitchedOff, restarter
from xkv_frontend.core.salt import Secret
from xkv_frontend.core.sse import EVENT_BYTES_MAX, EventReader, StreamTooLargeError
from xkv_frontend.core.stats import SHARES, Arm, Conclusion, Estimate, Finding, Samples, conclude, estimate
from xkv_frontend.errors import UnreachableError
from xkv_frontend.plot import draw
from xkv_frontend.timing import TimingOptions, probes_in_all, study

if TYPE_CHECKING:
    from pathlib import Path

    from tests.frontend.fake_vllm import FakeVllm
    from xkv_frontend.core.salt import Salter


MORE = 60
SCATTER_NS = 4_000_000


async def run(
    front: Running, fake: FakeVllm, seed: int = 1, command: str | None = None, jitter_ns: int = 400_000
) -> dict[Arm, Samples]:
    """Run the study against the fake's own clock: its latency model decides, not this machine."""
    lots = random.Random(seed)
    fake.jitter_ns = lambda: lots.randrange(jitter_ns)
    options = TimingOptions(
        front.url, fake.url, KEY_A, KEY_B, KEY_A2, probes=12, probes_max=MORE, lines=30, settle_s=0,
        restart_command=command,
    )  # fmt: skip
    planned: list[int] = []
    samples = await study(options, lambda: fake.now_ns, lots.randbytes, planned.append)
    assert planned[0] == probes_in_all(options)
    assert planned == sorted(planned)
    assert planned[-1] == len(planned)
    return samples


def judged(samples: dict[Arm, Samples]) -> tuple[dict[Arm, Estimate], Conclusion]:
    estimates = {arm: estimate(of_arm, np.random.default_rng(1)) for arm, of_arm in samples.items()}
    return estimates, conclude(estimates).conclusion


async def test_without_salts_there_is_a_signal_and_with_them_there_is_none(
    front: Running, fake: FakeVllm, tmp_path: Path
) -> None:
    async with restarter(fake) as command:
        samples = await run(front, fake, command=command)
    estimates, conclusion = judged(samples)
    assert conclusion is Conclusion.HIDDEN
    assert {arm: found.finding for arm, found in estimates.items()} == {
        Arm.UNSALTED: Finding.SIGNAL,
        Arm.OTHER: Finding.NO_SIGNAL,
        Arm.COLLEAGUE: Finding.SIGNAL,
        Arm.OTHER_RESTARTED: Finding.NO_SIGNAL,
        Arm.COLLEAGUE_RESTARTED: Finding.SIGNAL,
    }
    assert estimates[Arm.COLLEAGUE_RESTARTED].cached_share == pytest.approx(1, abs=0.1)
    picture = tmp_path / "timing.png"
    draw(samples, estimates, picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


async def test_where_times_scatter_the_other_tenant_s_arms_go_on_until_there_is_a_statement(
    front: Running, fake: FakeVllm
) -> None:
    async with restarter(fake) as command:
        samples = await run(front, fake, command=command, jitter_ns=SCATTER_NS)
    taken = {arm: len(of_arm.known_ms) for arm, of_arm in samples.items()}
    assert 12 < taken[Arm.OTHER] < MORE
    assert 12 < taken[Arm.OTHER_RESTARTED] < MORE
    assert {taken[arm] for arm in SHARES} == {12}
    assert judged(samples)[1] is Conclusion.HIDDEN


async def test_they_end_at_the_bound_or_at_the_first_cached_token(
    front: Running, fake: FakeVllm, tmp_path: Path
) -> None:
    samples = await run(front, fake, jitter_ns=100 * SCATTER_NS)
    assert len(samples[Arm.OTHER].known_ms) == MORE
    async with running_front(fake, tmp_path, salter=SaltSwitchedOff(Secret(SECRET), "prod")) as leaky:
        samples = await run(leaky, fake, jitter_ns=100 * SCATTER_NS)
    assert len(samples[Arm.OTHER].known_ms) == 12


@pytest.mark.parametrize("build", [SaltSwitchedOff])
async def test_with_the_salt_switched_off_others_can_tell(
    fake: FakeVllm, tmp_path: Path, build: type[Salter]
) -> None:
    async with running_front(fake, tmp_path, salter=build(Secret(SECRET), "prod")) as front:
        estimates, conclusion = judged(await run(front, fake))
    assert estimates[Arm.OTHER].finding is Finding.SIGNAL
    assert conclusion is Conclusion.VISIBLE


async def test_without_a_cache_the_study_says_that_it_sees_nothing(front: Running, fake: FakeVllm) -> None:
    fake.cache.enabled = False
    assert judged(await run(front, fake))[1] is Conclusion.INCONCLUSIVE


async def test_vllm_without_the_route_that_empties_its_cache_is_named(front: Running, fake: FakeVllm) -> None:
    options = TimingOptions(front.url, front.url, KEY_A, KEY_B, KEY_A2, probes=5, settle_s=0)
    with pytest.raises(UnreachableError):
        await study(options, lambda: 0, random.Random(1).randbytes, lambda _: None)
    assert SALTER is not None


def of(known: list[float], fresh: list[float], cached: int = 0) -> Estimate:
    samples = Samples(tuple(known), tuple(fresh), (cached,) * len(known), (100,) * len(known))
    return estimate(samples, np.random.default_rng(1))


async def test_a_cache_that_is_busy_is_emptied_before_anything_is_timed(
    front: Running, fake: FakeVllm
) -> None:
    fake.busy_resets = 3
    _, conclusion = judged(await run(front, fake))
    assert conclusion is Conclusion.HIDDEN
    assert fake.busy_resets == 0


def test_a_wide_interval_is_no_statement() -> None:
    noisy = [float(n % 7) * 100 for n in range(30)]
    clear = of([50.0 + n % 3 for n in range(30)], [500.0 + n % 3 for n in range(30)], 95)
    found = conclude({Arm.UNSALTED: clear, Arm.OTHER: of(noisy, noisy[::-1])})
    assert found.conclusion is Conclusion.INCONCLUSIVE
    assert clear.difference_ms == pytest.approx(450)


def test_one_cached_token_of_another_tenant_is_enough() -> None:
    clear = of([50.0] * 9, [500.0] * 9, 95)
    level = Samples((500.0,) * 9, (500.0,) * 9, (0,) * 8 + (16,), (100,) * 9)
    found = conclude({Arm.UNSALTED: clear, Arm.OTHER: estimate(level, np.random.default_rng(1))})
    assert found.conclusion is Conclusion.VISIBLE


def test_colleagues_that_lose_their_cache_are_no_success() -> None:
    clear, level = of([50.0] * 9, [500.0] * 9, 95), of([500.0] * 9, [500.0] * 9)
    found = conclude({Arm.UNSALTED: clear, Arm.OTHER: level, Arm.COLLEAGUE: level})
    assert found.conclusion is Conclusion.INCONCLUSIVE


STREAM = b": hello\n\ndata: one\n\ndata: two\r\ndata: lines\r\n\r\nevent: error\ndata:\n\ndata\rid: 3\r\rdata: [DONE]\n\n"


def test_a_stream_is_read_the_same_in_any_pieces() -> None:
    whole = EventReader().feed(STREAM)
    assert whole == [b"one", b"two\nlines", b"", b"", b"[DONE]"]
    for cut in range(len(STREAM)):
        reader = EventReader()
        assert reader.feed(STREAM[:cut]) + reader.feed(STREAM[cut:]) == whole
        assert reader.whole
    reader = EventReader()
    assert [found for byte in STREAM for found in reader.feed(bytes([byte]))] == whole
    reader.feed(b"data: half")
    assert not reader.whole


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(StreamTooLargeError):
        EventReader().feed(b"data: " + b"x" * EVENT_BYTES_MAX)
