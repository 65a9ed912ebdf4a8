"""Hard cases on the virtual clock: streams that could starve somebody, a full pool for an hour, chunks in flight at the
end of a request, deadlines that have passed."""

from collections.abc import Sequence

import numpy as np
import pytest

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.params import SLO
from medha.sched.decision import SchedulerRequest
from medha.sched.policy import BUILT_IN
from medha.sched.scheduler import Scheduler
from tests.sched.virtual import BLOCK, Drive, Job, finish, new_scheduler

DEFAULT = SchedulerConfig()


def alone_s(num_tokens: int) -> float:
    """Seconds of a prefill that runs alone."""
    return Drive(new_scheduler(num_blocks=1 << 16), [Job(0.0, num_tokens)], None).run().first_token_s[0]


# -- B22: streams ------------------------------------------------------------------------------------------------

LONG, SHORT = DEFAULT.long_threshold, 1000


@pytest.mark.parametrize("load", [0.7, 1.0, 1.5])
def test_a_long_request_ends_within_its_bound_while_a_stream_of_short_ones_goes_on(load: float) -> None:
    """The guard's bound with the default configuration: from its deadline on at the latest its share for the late."""
    long_s, short_s = alone_s(LONG), alone_s(SHORT)
    deadline_s = DEFAULT.deadline_factor * long_s
    assert deadline_s > max(DEFAULT.patience_s, DEFAULT.deadline_floor_s)
    bound_s = deadline_s + long_s / DEFAULT.guarded_share
    stream = [Job(at_s, SHORT, 2) for at_s in np.arange(0.0, bound_s + 10.0, short_s / load).tolist()]
    drive = Drive(new_scheduler(num_blocks=1 << 16), [Job(0.0, LONG, 2), *stream], None).run()
    assert drive.first_token_s[0] < bound_s < stream[-1].arrival_s
    if load < 1:  # nobody waits much longer than the queue of the short ones alone would make it
        waits_s = [drive.first_token_s[i] - job.arrival_s for i, job in enumerate(stream, 1)]
        assert max(waits_s) < 10 * short_s


@pytest.mark.parametrize("load", [0.7, 1.5])
def test_short_requests_wait_seconds_while_a_stream_of_long_ones_goes_on(load: float) -> None:
    """Even where the long ones are more than can be served, and queue up without end."""
    long_s, short_s = alone_s(LONG), alone_s(SHORT)
    stream = [Job(i * long_s / load, LONG, 2) for i in range(8)]
    shorts = [Job(at_s, SHORT, 2) for at_s in np.linspace(1.0, stream[-1].arrival_s, 8).tolist()]
    drive = Drive(new_scheduler(num_blocks=1 << 16), stream + shorts, None).run()
    waits_s = [drive.first_token_s[i] - job.arrival_s for i, job in enumerate(shorts, len(stream))]
    deadline_s = max(DEFAULT.deadline_floor_s, DEFAULT.deadline_factor * short_s)
    assert max(waits_s) < deadline_s < long_s


# -- D9: a full pool ---------------------------------------------------------------------------------------------

NUM_BLOCKS = 64
HOUR_S = 3600.0
STEP_S = 2.0


class FullPool(Drive):
    """Notes how full the pool is while requests wait, held and reserved.

    What every batch may take and what it may not is checked by :class:`Drive`: a block that two hold, one that is freed
    too early, a deadlock.
    """

    def __init__(self, scheduler: Scheduler, jobs: Sequence[Job]) -> None:
        super().__init__(scheduler, jobs, lambda batch: STEP_S, busy=lambda real_s: 0.0)  # which teaches nothing
        self.held: list[int] = []
        self.reserved: list[int] = []

    def on_schedule(self, batch: Batch | None) -> None:
        if batch is not None and self.scheduler.num_waiting:
            self.held.append(self.scheduler.memory.num_used)
            requests = [self.live[row.slot].request for row in batch.rows]
            self.reserved.append(sum(-(-request.num_kv_tokens // BLOCK) for request in requests))


@pytest.mark.parametrize("overcommit", [False, True])
def test_a_full_pool_for_an_hour_corrupts_and_stalls_nothing(overcommit: bool) -> None:
    random = np.random.default_rng(9)
    arrivals_s = np.arange(0.0, HOUR_S, 20.0 * STEP_S).tolist()
    jobs = [Job(at_s, *random.integers(20, 200, 2).tolist()) for at_s in arrivals_s]
    drive = FullPool(new_scheduler(num_blocks=NUM_BLOCKS, overcommit=overcommit), jobs).run()
    assert drive.now_s > HOUR_S
    assert len(drive.finish_s) == len(jobs)
    assert len(drive.held) > 0.9 * HOUR_S / STEP_S  # somebody waits for memory nearly all the time
    if overcommit:
        assert np.mean(drive.held) > 0.8 * NUM_BLOCKS and max(drive.held) == NUM_BLOCKS
        assert len(drive.gave_way) > 20
    else:
        assert np.mean(drive.reserved) > 0.85 * NUM_BLOCKS  # some is kept free for who was passed over
        assert not drive.gave_way
    ends_s = np.sort(list(drive.finish_s.values()))
    assert np.diff(ends_s, prepend=0.0).max() < 300 * STEP_S  # the longest output, and some


# -- B20: deadlines that have passed, and no work ----------------------------------------------------------------


@pytest.mark.parametrize("policy", BUILT_IN)
def test_requests_whose_deadline_has_passed_are_served(policy: str) -> None:
    """Late before they come, by a little and by years; beside others, no one's key is NaN and all end."""
    scheduler = new_scheduler(num_blocks=1 << 16, policy=policy)
    late = [SLO(ttft_s=1e-9), SLO(ttft_s=0.5, tpot_s=1e-9), None]
    with np.errstate(divide="raise", invalid="raise"):
        for slot, slo in enumerate([*late, SLO(ttft_s=1e9)]):
            scheduler.add(SchedulerRequest(slot, 1 + 50 * slot, 1, -1e8 if slot < 3 else 0.0, slo))
        served = set()
        while (batch := scheduler.schedule(1.0).batch) is not None:
            served |= {row.slot for row in batch.rows if row.samples}
            finish(scheduler, batch, 1.0, 0.1, ended=served)
    assert served == {0, 1, 2, 3}
