"""How an engine schedules must not matter: guesses that are refused, steps planned ahead, preemption, ends in any state."""

from __future__ import annotations

import pytest

from tests.connector.mini_parts import MiniRequest, Tables
from tests.connector.pipelined import PipelinedEngine
from tests.connector.rig import MODELS, connector, gateway
from tests.connector.test_engine import end_in_order, prompt, request
from tests.rpc.harness import wait_until

CHUNK = 8


@pytest.mark.parametrize("guesses", [0, 1, 5])
@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("model", ["full", "gemma", "llama4"])
def test_only_what_is_certain_is_stored_however_far_the_engine_runs_ahead(
    model: str, guesses: int, *, lag: bool
) -> None:
    with gateway() as (service, served):
        with connector(service, served, MODELS[model], ranks=2) as rig:
            engine = PipelinedEngine(rig, guesses=guesses, lag=lag)
            asked = [
                engine.add(request(prompt(11 + 13 * seed, seed), "a", new_tokens=50 + seed))
                for seed in range(5)
            ]
            while len(asked[1].output) < 20:
                engine.step()
            engine.preempt(asked[1])
            engine.abort(asked[2])
            engine.settle()
            end_in_order(rig)
            assert rig.count("chunks_shed") == 0
        finished = [one for one in asked if one is not asked[2]]
        texts = [one.prompt + bytes(one.output) for one in finished]
        with connector(service, served, MODELS[model], ranks=2) as rig:
            # The next turn of each talk. The engine compares what is loaded with what it must be.
            again = [request(text, "a") for text in texts]
            rig.engine.run(*again)
            end_in_order(rig)
            assert rig.count("loads_failed") == 0
            found = [one.external_total for one in again]
            most = [(len(text) - 1) // CHUNK * CHUNK for text in texts]
            if model == "full":
                assert found == most
            assert all(0 < one <= bound for one, bound in zip(found, most, strict=True))


class Hasty(MiniRequest):
    """A request whose guesses look certain."""

    @property
    def num_tokens(self) -> int:
        return super().num_tokens + (5 if self.hasty else 0)

    hasty = False


def test_the_engine_would_notice_a_guess_that_was_stored() -> None:
    """The control of the test above: with a count that takes guesses for tokens, wrong blocks are stored, and found out."""
    with gateway() as (service, served):
        with connector(service, served) as rig:
            engine = PipelinedEngine(rig, guesses=5, lag=False)
            asked = Hasty("hasty", prompt(11), new_tokens=60, cache_salt="a")
            engine.add(asked)
            plan = rig.side.plan

            def hasty_plan(scheduled: dict[str, int], tables: Tables) -> object:
                # The hashes of the guesses, as if they had been accepted: those of the tokens that will come.
                ahead = MiniRequest("ahead", asked.prompt, cache_salt="a")
                while len(ahead.output) < len(asked.output) + 6:
                    ahead.append()
                hashes, asked.block_hashes = asked.block_hashes, ahead.block_hashes
                asked.hasty = True
                try:
                    return plan(scheduled, tables)
                finally:
                    asked.hasty = False
                    asked.block_hashes = hashes

            rig.side.plan = hasty_plan  # type: ignore[method-assign]
            engine.settle()
        with connector(service, served) as rig:
            with pytest.raises(AssertionError, match="wrong tokens"):
                rig.engine.run(request(asked.prompt + bytes(asked.output), "a"))
            rig.engine.requests.clear()


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("lag", [False, True])
def test_a_request_that_ends_on_a_block_edge_is_stored_as_far_as_it_was_computed(
    length: int, *, lag: bool
) -> None:
    with gateway() as (service, served), connector(service, served) as rig:
        engine = PipelinedEngine(rig, guesses=0, lag=lag)
        engine.run(request(prompt(length)))
        # One token is generated and never computed: what is stored is what the prompt fills.
        assert rig.count("chunks_stored") == length // CHUNK
        more = request(prompt(2 * CHUNK - 3, 1), new_tokens=4)
        engine.run(more)
        assert rig.count("chunks_stored") == length // CHUNK + 2
        end_in_order(rig)


def test_a_chunk_whose_blocks_are_not_told_in_one_step_is_stored_in_a_later_one() -> None:
    with gateway() as (service, served), connector(service, served) as rig:
        asked = request(prompt(3 * CHUNK + 1), new_tokens=5)
        rig.engine.add(asked)
        rig.side.match(asked, 0)
        rig.side.allocated(asked, (), 0)
        asked.tables = [[]]
        rig.engine._grow(asked, 3 * CHUNK)
        table = asked.tables[0]
        name = asked.request_id
        assert rig.side.plan({name: 3 * CHUNK}, None).stores == []
        assert rig.side.plan({name: 3 * CHUNK}, Tables({}, {})).stores == []
        # The shorter of hashes and blocks wins: a chunk and a half is told.
        (job,) = rig.side.plan({name: 3 * CHUNK}, Tables({name: [table[:3]]}, {})).stores
        assert [part.chunk for part in job.parts] == [0]
        asked.num_computed_tokens = 3 * CHUNK
        (job,) = rig.side.plan({name: 1}, Tables({name: [table]}, {})).stores
        assert [part.chunk for part in job.parts] == [1, 2]
        assert rig.side.plan({name: 1}, Tables({name: [table]}, {})).stores == []


@pytest.mark.parametrize("aborted", [True, False])
def test_a_request_whose_blocks_are_gone_when_it_ends_stores_nothing_more(*, aborted: bool) -> None:
    """The engine has taken its blocks already (an abort, say) while the hashes are still there."""
    with gateway() as (service, served), connector(service, served) as rig:
        asked = request(prompt(3 * CHUNK + 1), new_tokens=5)
        rig.side.begin(asked)
        wait_until(lambda: rig.side.match(asked, 0)[0] == 0, "there is an answer")
        rig.side.allocated(asked, (), 0)
        asked.num_computed_tokens = 3 * CHUNK
        rig.side.finished(asked, [[]], aborted=aborted)
        assert rig.side.plan({}, None).stores == []
        assert not rig.side.pending
        assert service.objects == {}
