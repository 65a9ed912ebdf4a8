"""The ledger: parts that sum to the TTFT, whatever ran."""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from medha.batch import Batch, Row
from medha.engine.explain import Explainer, explained
from medha.outputs import Explanation
from medha.params import SLO
from medha.sched.decision import Admitted, Decision, SchedulerRequest
from medha.sched.scheduler import Scheduler
from tests.sched.virtual import Drive, Job, by_tokens, make_scheduler, new_scheduler, worlds


class Watched(Drive):
    """A drive that feeds an explainer."""

    def __init__(self, scheduler: Scheduler, *args: Any, **options: Any) -> None:
        self.explainer = Explainer(scheduler.memory.num_groups, scheduler.predictor)
        super().__init__(scheduler, *args, **options, observers=[self.explainer])
        self.explained: dict[int, Explanation] = {}
        self.beside: dict[int, set[str]] = {}  # by job: who had a chunk in a batch since it arrived

    def _complete(self) -> None:
        chunks = {self.live[row.slot].job: row.slot for row in self._in_flight[0][0].chunks}
        for live in self.live.values():
            self.beside.setdefault(live.job, set()).update(f"job {job}" for job in chunks)
        super()._complete()
        for job, slot in chunks.items():
            if self.first_token_s.get(job) == self.now_s:
                self.explained[job] = self.explainer.of(slot)


def check(drive: Watched) -> None:
    """Every first token is explained: parts that sum to the TTFT, and others that ran meanwhile, largest first."""
    assert set(drive.explained) == set(drive.first_token_s)
    for job, found in drive.explained.items():
        ttft_s = drive.first_token_s[job] - drive.jobs[job].arrival_s
        assert found.has_first_token and found.request_id == f"job {job}"
        assert found.total_s == pytest.approx(ttft_s)
        assert sum(found.parts_s.values()) == pytest.approx(ttft_s, abs=1e-6)
        assert min(found.parts_s.values()) > -1e-9
        seconds = [seconds for _, seconds in found.others]
        assert sum(seconds) <= found.others_s + 1e-6 and seconds == sorted(seconds, reverse=True)
        assert {name for name, _ in found.others} <= drive.beside[job] - {f"job {job}"}
        assert found.text()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_the_parts_sum_to_the_ttft_whatever_runs(world: dict[str, Any], noise: Random, slack: float) -> None:
    """The stage is busy for a part of each batch only."""

    def seconds(batch: Batch) -> float:
        return (0.01 + 1e-3 * batch.num_tokens) * noise.uniform(0.5, 2.0)

    check(Watched(make_scheduler(world), world["load"], seconds, busy=lambda real_s: real_s * slack).run())


def sarathi(*, num_blocks: int = 100, **config: Any) -> Scheduler:
    """One batch at a time, whose seconds are dealt out by tokens."""
    return new_scheduler("sarathi", num_blocks=num_blocks, block_size=4, predictor=by_tokens(), depth=1, **config)


def play(load: Sequence[Job], *, num_blocks: int = 100, tokens: int = 16) -> Watched:
    """A second a batch."""
    sched = sarathi(num_blocks=num_blocks, chunk_size=8, max_batch_tokens=tokens)
    check(drive := Watched(sched, load, lambda batch: 1.0).run())
    return drive


def test_what_runs_beside_and_before_is_named() -> None:
    """Slot 0 decodes, slot 1 reads a prompt, slot 2 arrives in the middle of the second batch."""
    explained = play([Job(0.0, 7, 4), Job(0.1, 30, 1), Job(1.5, 14, 1)], tokens=9).explained[2]
    # Half of the second batch, then two whole ones: a decode and eight tokens of slot 1 each. The fifth has the last
    # six of slot 1 beside three of slot 2, and two more are slot 2's alone.
    assert explained.decodes_s == pytest.approx(2.5 / 9)
    assert explained.others == (("job 1", pytest.approx(2.5 * 8 / 9 + 6 / 9)),)
    assert explained.own_s == pytest.approx(3 / 9 + 2)
    assert explained.text(str.upper).startswith("JOB 2: TTFT 5.500 s\n  own compute")
    assert "(JOB 1 2.889)" in explained.text(str.upper)


def test_slack_is_sampled_where_it_bends() -> None:
    """It falls by a second a second while a request waits, and by nothing while its own chunks run as predicted."""
    load = [Job(0.0, 600, 1, slo=SLO(9.0)), Job(0.5, 600, 1, slo=SLO(30.0))]
    drive = Watched(new_scheduler(num_blocks=100, policy="fcfs", t_target_s=0.5, depth=1), load, None).run()
    (at_s, first_s), *_, (end_s, last_s) = drive.explained[0].slack_s
    assert (at_s, end_s) == (0.0, drive.first_token_s[0])
    assert last_s == pytest.approx(9.0 - drive.first_token_s[0])
    assert first_s == pytest.approx(last_s, abs=0.05)
    samples = drive.explained[1].slack_s
    waited_s = drive.first_token_s[0] - 0.5
    assert samples[0][1] - samples[-1][1] == pytest.approx(waited_s, abs=0.3)
    assert "slack +29." in drive.explained[1].text()


def test_samples_stay_few() -> None:
    drive = play([Job(0.0, 800, 1, slo=SLO(500.0))], num_blocks=300)
    samples = drive.explained[0].slack_s
    assert 5 < len(samples) < 20
    assert samples[0] == (0.0, pytest.approx(499.2))  # its own tokens take 0.8 s
    assert samples[-1] == (100.0, 400.0)
    steps_s = [after - before for (before, _), (after, _) in pairwise(samples)]
    assert max(steps_s) <= 2 * min(steps_s[:-1])


def test_a_request_without_a_first_token_is_explained_so_far_and_a_cancelled_one_to_its_end() -> None:
    sched, explainer = sarathi(chunk_size=8, max_batch_tokens=8), Explainer(1, by_tokens())
    for slot in (0, 1):
        explainer.added(request := SchedulerRequest(slot, 16, 1, 0.0), 0.0, sched.add(request), f"slot {slot}")
    assert explainer.of(1).total_s == 0.0
    for now_s in (0.0, 1.0):
        batch = (decision := sched.schedule(now_s)).batch
        explainer.scheduled(now_s, decision)
        sched.complete(batch, now_s + 1.0, [(0, 1, True)] if now_s else [], 1.0)
        explainer.completed(batch, now_s + 1.0, (), 1.0)
        if now_s == 0.0:
            explainer.cancelled(1, sched.cancel(1))
    explained = explainer.of(1)
    assert not explained.has_first_token
    assert (explained.total_s, explained.others_s, explained.others) == (1.0, 1.0, (("slot 0", 1.0),))
    assert explained.text().startswith("slot 1: no first token after 1.000 s\n")
    with pytest.raises(KeyError):
        explainer.of(2)


def test_time_before_it_was_known_is_idle_where_nothing_ran() -> None:
    """An arrival that the scheduler hears of later: what ran meanwhile counts as that."""
    sched, explainer = sarathi(), Explainer(1, by_tokens())

    def serve(slot: int, arrival_s: float, start_s: float, end_s: float) -> Explanation:
        request = SchedulerRequest(slot, 8, 1, arrival_s)
        explainer.added(request, start_s, sched.add(request), f"slot {slot}")
        batch = (decision := sched.schedule(start_s)).batch
        explainer.scheduled(start_s, decision)
        sched.complete(batch, end_s, [(slot, 1, True)], end_s - start_s)
        explainer.completed(batch, end_s, (), end_s - start_s)
        return explainer.of(slot)

    first = serve(0, 1.0, 3.0, 4.0)
    assert (first.total_s, first.idle_s, first.own_s) == (3.0, 2.0, 1.0)
    second = serve(1, 3.5, 4.0, 5.0)
    assert (second.total_s, second.others_s, second.own_s, second.others) == (1.5, 0.5, 1.0, (("slot 0", 0.5),))
    third = serve(0, 4.5, 7.0, 8.0)
    assert (third.total_s, third.others_s, third.idle_s, third.own_s) == (3.5, 0.5, 2.0, 1.0)


def test_with_lanes_the_group_on_which_a_request_begins_tells_of_it() -> None:
    """Two batches begin at once, and the younger one ends first; slot 2 has begun nowhere."""
    lanes = [Explainer(2, by_tokens(), lane) for lane in (0, 1)]
    sent = [Batch(group, (Row(group, 0, 8, False, True, group),)) for group in (0, 1)]
    for lane in lanes:
        for slot in (0, 1, 2):
            head = SchedulerRequest(slot, 8, 1, 0.0)
            lane.added(head, 0.0, Admitted(math.inf, math.inf, is_relegated=False), f"slot {slot}")
        for batch in sent:
            lane.scheduled(0.0, Decision(batch, slack_s=(math.inf,)))
        lane.completed(sent[1], 1.0, (), 1.0)
        lane.completed(sent[0], 4.0, (), 3.0)
    first, second, third = (explained(lanes, slot) for slot in (0, 1, 2))
    assert (first.total_s, first.own_s, first.pipeline_s, first.others_s) == (4.0, 3.0, 1.0, 0.0)
    assert (second.total_s, second.own_s, second.others_s) == (1.0, 1.0, 0.0)
    assert (third.total_s, third.others_s, third.others) == (4.0, 3.0, (("slot 0", 3.0),))
