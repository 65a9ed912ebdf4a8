"""Who cannot be in time: what is predicted of a request before it is taken, and where a relegated one comes."""

from dataclasses import replace
from typing import Any

import pytest

from medha.config import SCHEDULERS, SchedulerConfig
from medha.cost.predictor import KINDS, Work
from medha.errors import ConfigError, DeadlineError
from medha.params import SLO
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from tests.sched.virtual import Steps, make_predictor, new_scheduler


def make_scheduler(admission: str = "refuse", **options: Any) -> Scheduler:
    return new_scheduler(num_blocks=2000, admission=admission, **options)


def request(slot: int = 0, num_prompt: int = 1000, *, ttft_s: float | None = None) -> SchedulerRequest:
    return SchedulerRequest(slot, num_prompt, 4, 0.0, SLO(ttft_s))


def alone_s(scheduler: Scheduler) -> float:
    """Of a prompt of 1,000 tokens alone: its derived deadline is a multiple of it."""
    config = replace(scheduler.config, deadline_floor_s=1e-9, deadline_factor=1.0)
    alone = new_scheduler(config, num_blocks=2000, predictor=scheduler.predictor)
    return alone.add(SchedulerRequest(0, 1000, 4, 0.0)).deadline_s


def late_s(scheduler: Scheduler, asked: SchedulerRequest, now_s: float) -> float | None:
    """The predicted TTFT for which a request is refused; None if it is taken, and then it is cancelled again."""
    try:
        scheduler.add(asked, now_s)
    except DeadlineError as error:
        return error.predicted_s
    scheduler.cancel(asked.slot)
    return None


def test_an_objective_shorter_than_the_prefill_alone_cannot_be_met() -> None:
    scheduler = make_scheduler()
    needed_s = alone_s(scheduler)
    assert needed_s > 0.1
    assert late_s(scheduler, request(ttft_s=needed_s * 1.001), 0.0) is None
    assert late_s(scheduler, request(ttft_s=needed_s * 0.999), 0.0) == pytest.approx(needed_s)
    assert late_s(scheduler, request(), 0.0) is None
    assert late_s(scheduler, SchedulerRequest(0, 1000, 4, 0.0), 0.0) is None


@pytest.mark.parametrize("period", [1, 2])
def test_a_cadence_that_a_decode_alone_cannot_keep(period: int) -> None:
    """It is refused, or bounds no batch: those behind it are read as if it had not been asked for."""
    needed_s = period * make_predictor().predict([Work(1, 1000, is_decode=True)])
    for tpot_s, is_late in ((needed_s * 1.001, False), (needed_s * 0.999, True)):
        asked = SchedulerRequest(0, 1000, 400, 0.0, SLO(tpot_s=tpot_s))
        refused_s = late_s(make_scheduler(depth=period), asked, 0.0)
        assert refused_s == (pytest.approx(needed_s) if is_late else None)
        scheduler = make_scheduler("all", depth=period)
        assert scheduler.add(asked, 0.0).alone_tpot_s == refused_s
        assert order_of_first_chunks(scheduler) == [0]
    with pytest.raises(DeadlineError, match=r"slo.tpot_s=1e-06: a token is predicted to take 0.0\d* s even alone; acc"):
        make_scheduler().add(SchedulerRequest(0, 1000, 4, 0.0, SLO(tpot_s=1e-6)), 0.0)
    scheduler = make_scheduler()
    scheduler.add(SchedulerRequest(0, 1000, 1, 0.0, SLO(tpot_s=1e-6)))  # it decodes elsewhere, or not at all
    assert scheduler._queue.waiting[0].request.slo == SLO()  # nor does it bound a batch


def test_the_wait_so_far_and_what_is_in_flight_count() -> None:
    scheduler = make_scheduler()
    needed_s = alone_s(scheduler)
    late = replace(request(ttft_s=needed_s + 1.0), arrival_s=2.0)
    assert late_s(scheduler, late, 2.9) is None
    assert late_s(scheduler, late, 3.5) == pytest.approx(needed_s + 1.5)
    scheduler.add(request(1, 3000))
    assert late_s(scheduler, late, 2.9) is None  # it would run next: those who wait do not count
    prediction = scheduler.schedule(2.9).prediction
    assert prediction is not None
    in_flight_s = prediction.seconds
    assert in_flight_s > 0.1
    assert late_s(scheduler, late, 2.9) == pytest.approx(0.9 + in_flight_s + needed_s)
    with pytest.raises(DeadlineError) as caught:
        scheduler.add(late, 2.9)
    assert caught.value.wait_s == pytest.approx(in_flight_s - 0.1)  # then the like of it would be in time
    with pytest.raises(DeadlineError) as caught:
        scheduler.add(request(ttft_s=0.9 * needed_s), 2.9)
    assert caught.value.wait_s is None  # the like of it never would


def test_what_was_learned_in_a_slow_minute_does_not_refuse_all_for_good() -> None:
    scheduler = make_scheduler()
    needed_s = alone_s(scheduler)
    for kind in KINDS:
        scheduler.predictor.observe(kind, 1.0, 5.0)
    slo = SLO(1.1 * needed_s, 2.0 * make_predictor().predict([Work(1, 1000, is_decode=True)]))
    asked = [SchedulerRequest(slot, 1000, 4, 0.0, slo) for slot in (0, 1)]
    scheduler.add(asked[0], 0.0)
    assert late_s(scheduler, asked[1], 0.0) > 2.0 * needed_s  # one at a time
    assert late_s(make_scheduler(), request(ttft_s=0.9 * needed_s), 0.0) == pytest.approx(needed_s)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_predict_nothing_admit_all(name: str) -> None:
    for admission in ("all", "refuse", "relegate"):
        if name == "medha" or admission == "all":
            assert SchedulerConfig(name, admission=admission).admission == admission
            continue
        with pytest.raises(ConfigError, match=f"admission='{admission}' needs predictions, which scheduler='{name}'"):
            SchedulerConfig(name, admission=admission)
    with pytest.raises(ConfigError, match="admission='never'; accepted: all, refuse, relegate"):
        SchedulerConfig(admission="never")


def order_of_first_chunks(scheduler: Scheduler, *, until_s: float = 1e9) -> list[int]:
    """Slots as they get their first chunks, a batch at a time, each taking what was predicted."""
    steps, seen = Steps(scheduler), dict[int, None]()
    while steps.now_s < until_s and scheduler.num_running + scheduler.num_waiting:
        seen |= dict.fromkeys(row.slot for row in steps.step()[0].chunks)
    return list(seen)


@pytest.mark.parametrize("policy", ["lars", "ilrs", "lrs", "edf", "fcfs", "sjf", "srpt", "priority"])
def test_a_relegated_request_comes_after_all_who_can_be_in_time(policy: str) -> None:
    scheduler = make_scheduler("relegate", policy=policy, long_threshold=10_000, late_share=0)
    assert scheduler.add(request(0, 4000, ttft_s=0.01), 0.0).is_relegated
    for slot in range(1, 6):
        assert scheduler.add(request(slot, 4000, ttft_s=90.0 + slot), 0.0).deadline_s == 90.0 + slot
    assert order_of_first_chunks(scheduler) == [1, 2, 3, 4, 5, 0]


def test_also_after_those_of_a_tenant_that_is_ahead() -> None:
    scheduler = make_scheduler("relegate", long_threshold=10_000, late_share=0)
    scheduler.add(replace(request(0, 4000, ttft_s=0.01), tenant="behind"), 0.0)
    for slot in range(1, 4):
        scheduler.add(replace(request(slot, 4000, ttft_s=90.0), tenant="ahead"), 0.0)
    scheduler._queue.tenants.charge(scheduler._queue.waiting[1].tenant, 5.0)
    assert order_of_first_chunks(scheduler) == [1, 2, 3, 0]


def test_the_guard_still_serves_a_relegated_request() -> None:
    """Under an overload that would never let it run."""
    scheduler = make_scheduler("relegate", patience_s=2.0, late_share=0.2)
    scheduler.add(request(0, 500, ttft_s=0.01), 0.0)
    for slot in range(1, 40):
        scheduler.add(request(slot, 1500, ttft_s=1000.0))
    assert 0 in order_of_first_chunks(scheduler, until_s=10.0)
