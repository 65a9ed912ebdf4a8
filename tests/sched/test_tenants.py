"""Fair shares of tenants: in seconds of compute, within a class, and only where several want to be served."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from medha.sched.tenants import LEAD_S, Tenants
from tests.sched.virtual import Drive, Job, make_predictor, new_scheduler

PREDICTOR = make_predictor(max_tokens=2048)
Load = list[tuple[float, int, str, int]]
"""(arrival, prompt tokens, tenant, class) of requests in order of arrival; each asks for four tokens."""
RELEGATED = 4  # in place of a class


def first_tokens(
    load: Load, until_s: float | None = None, *, num_new: int = 4, late_share: float = 0.0, **options: Any
) -> dict[int, float]:
    """TTFT by index of those that have a first token by then, on a virtual clock."""
    sizes = {"num_blocks": 1 << 17, "max_prompt_tokens": 100_000}
    scheduler = new_scheduler(predictor=PREDICTOR, late_share=late_share, **sizes, **options)
    its = [(at, tokens, num_new, None, None, order % 4, until_s, who, order == 4) for at, tokens, who, order in load]
    firsts_s = Drive(scheduler, [Job(*one) for one in its], None).run().first_token_s
    return {index: at_s - load[index][0] for index, at_s in firsts_s.items()}


def seconds_of(tokens: int) -> float:
    """Predicted seconds of a short prompt alone."""
    return PREDICTOR.tick().with_chunk(tokens, 0)


FLOOD: Load = [(0.0, 200, "a", 2)] * 400
"""Shorter prompts than the other tenant's, so that the policy alone would serve all of them before."""


LONG_FLOOD: Load = [(0.0, 20_000, "a", 2)] * 4
"""First come, first served, they would be read to their end before."""


@pytest.mark.parametrize(
    ("flood", "others", "policy"),
    [(FLOOD, [], "srpt"), *((FLOOD, [(0.0, 300, "c", n)], "srpt") for n in (3, RELEGATED)), (LONG_FLOOD, [], "fcfs")],
    ids=["short", "a third", "a relegated third", "long"],
)
def test_a_flood_of_one_tenant_holds_another_up_by_the_lead_at_most(flood: Load, others: Load, policy: str) -> None:
    """Also where a third comes after both, and so is served less."""
    load = [*flood, *((1.0 + i, 400, "b", 2) for i in range(20)), *others]
    ttfts = first_tokens(load, policy=policy)
    waits = [ttfts[index] for index in range(len(flood), len(flood) + 20)]
    alone_s, batch_s = seconds_of(400), seconds_of(2048)
    assert max(waits) < LEAD_S + 2 * batch_s + 2 * alone_s
    assert np.median(waits) < 2 * batch_s + 2 * alone_s  # b is behind by then
    nobodys = first_tokens([(at_s, tokens, "", order) for at_s, tokens, _, order in load], policy=policy)
    assert nobodys[len(flood)] > 5 * max(waits)


def test_nor_does_it_take_all_places_though_its_requests_are_late() -> None:
    """The guard's share is of time; of the places, which is what lacks, the late of who is ahead have none."""
    load = [*FLOOD[:200], *((1.0 + i, 400, "b", 2) for i in range(20))]
    ttfts = first_tokens(load, num_new=64, late_share=0.1, max_num_seqs=4)
    assert max([ttfts[index] for index in range(200, 220)]) < 20.0 and max(ttfts.values()) > 100.0


def test_one_tenant_alone_is_served_as_none_is() -> None:
    load = [(0.1 * i, 100 + 37 * i % 900, "", i % 4) for i in range(60)]
    assert first_tokens([(*r[:2], "x", r[3]) for r in load]) == first_tokens(load)


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0}, {"b": 0.25}])
def test_tenants_that_both_want_more_get_their_weights(weights: dict[str, float]) -> None:
    """Of prompts whose lengths differ, in seconds of compute and not in tokens or requests."""
    load: Load = [(0.0, tokens, tenant, 2) for _ in range(300) for tenant, tokens in (("a", 300), ("b", 1500))]
    served = first_tokens(load, 60.0, tenant_weights=weights)
    had_s = {t: sum(seconds_of(load[i][1]) for i in served if load[i][2] == t) for t in "ab"}
    shares = {t: had_s[t] / weights.get(t, 1.0) for t in "ab"}
    assert min(len(served), 600 - len(served)) > 50
    assert abs(shares["a"] - shares["b"]) < (LEAD_S + 2 * seconds_of(2048)) / min(1.0, *weights.values())


def test_a_class_goes_before_a_share() -> None:
    load: Load = [*FLOOD, (1.0, 400, "b", 2), (1.0, 400, "a", 1)]
    ttfts = first_tokens(load, interactive_share=0.0)
    assert ttfts[len(FLOOD) + 1] <= ttfts[len(FLOOD)] < 2 * LEAD_S


def test_nobody_saves_up_and_accounts_end_with_the_last_request() -> None:
    tenants = Tenants({"b": 2.0})
    a, b = tenants.enter("a"), tenants.enter("b")
    tenants.charge(a, 10.0)
    tenants.charge(b, 19.0)

    def ahead(*of: int, classes: Sequence[int] = ()) -> list[bool]:
        return tenants.ahead(np.array(of, np.int64), np.array(classes or [2] * len(of), np.int64)).tolist()

    assert ahead(a, b, a) == [False, False, False]
    tenants.charge(a, 0.6)
    assert ahead(a, b, a) == [True, False, True]
    assert ahead(a, b, a, classes=[2, 2, 1]) == [True, False, False]  # of the class of the last nobody else wants any
    assert ahead(a) == [False]  # the other wants nothing now
    assert ahead() == []
    tenants.leave(b)
    assert not tenants.are_several
    late = tenants.enter("late")
    assert ahead(a, late) == [False, False]
    tenants.leave(a)
    tenants.charge(late, 0.1)
    assert tenants.enter("a") == a and ahead(a, late) == [False, False]
    assert len({a, late, *(tenants.enter(str(i)) for i in range(20))}) == 22


def test_accounts_begin_anew_when_nobody_is_left() -> None:
    tenants = Tenants()
    for seconds, number in [(1.0, tenants.enter("little")), (100.0, tenants.enter("much"))]:
        tenants.charge(number, seconds)
    tenants.leave(0)
    tenants.leave(1)
    both = np.array([tenants.enter("little"), tenants.enter("much")])
    assert both[0] != both[1] and not tenants.ahead(both, np.zeros(2, np.int64)).any()
    for number in both.tolist():
        tenants.leave(number)
    again = [tenants.enter(name) for name in ("much", "little", "much", "little")]  # in another order
    assert again[:2] == again[2:] and again[0] != again[1]


def test_names_of_those_that_have_left_are_forgotten_once_they_would_start_at_the_least() -> None:
    tenants = Tenants({"b": 2.0})
    tenants.charge(stays := tenants.enter("stays"), 10.0)
    ahead = tenants.enter("ahead")
    tenants.charge(ahead, 30.0)
    tenants.leave(ahead)
    numbers = set()
    for name in ("", *map(str, range(50)), "b"):
        numbers.add(number := tenants.enter(name))
        tenants.leave(number)
    assert len(numbers) == 1 and ahead not in numbers
    assert tenants.enter("b") == number and tenants.enter("ahead") == ahead
    tenants.charge(number, 4.0)  # half of it counts
    tenants.charge(stays, LEAD_S)
    assert tenants.ahead(np.array([stays, number, ahead]), np.zeros(3, np.int64)).tolist() == [False, False, True]
    tenants.charge(number, 0.1)
    assert tenants.ahead(np.array([stays, number]), np.zeros(2, np.int64)).tolist() == [False, True]
