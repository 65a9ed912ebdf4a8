"""What a request may ask for, what is refused and by which name, and the arithmetic of its metrics."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest

from medha.errors import UnsupportedFeatureError, ValidationError
from medha.outputs import RequestMetrics
from medha.params import SLO, UNSUPPORTED_FIELDS, SamplingParams

NAN, INF = math.nan, math.inf

# Case B6: every field at each of these. A field accepts those that FIELDS names, at its other fields' defaults, and
# refuses the rest.
PROBES = (NAN, INF, -INF, -1, 0, 2**63, "1", None, True, 1.5, [[]], {"a": 1}, 10**400)
BOOLEANS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
PENALTIES = ("presence_penalty", "frequency_penalty")
# Each field's probes that it accepts, as they print, and the ends of its range: accepted, and just outside.
FIELDS: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    **dict.fromkeys(BOOLEANS, ("True", (False,), (1, 0.0))),
    **dict.fromkeys(PENALTIES, ("-1 0 1.5", (-2, -2.0, 2, 2.0), (-2.0000001, 2.0000001))),
    "n": ("", (1, 2, 16384), (0, 16385)),
    "temperature": ("0 None 1.5", (0.0, 1e-5, 2, 2.0), (-1e-9, 2.0000001, 2**63)),
    "top_p": ("None", (1e-9, 1, 1.0), (0.0, 1.0000001)),
    "top_k": ("-1 0 None", (1, 2**31 - 1), (-2, 2**31)),
    "min_p": ("0 None", (0.0, 1, 1.0), (-1e-9, 1.0000001)),
    "repetition_penalty": ("None 1.5", (1e-6, 1e6), (0.0, 1e-38, 1e6 + 1)),
    "seed": ("-1 0 None", (-(2**63), 2**63 - 1), (-(2**63) - 1,)),
    "stop": (
        "'1' None",
        (["a"] * 16, "x" * 256, [], ()),
        (["a"] * 17, "x" * 257, "", [""], [1], ["a", None], b"a", {"a"}),
    ),
    "stop_token_ids": ("None", ([0, 2**31 - 1], [], ()), ([-1], [2**31], [True], [1.0], ["1"], [None], {1}, 7)),
    "logit_bias": (
        "None",
        ({}, {3: -100, "4": 100.0}),
        ([1], {-1: 0.0}, {"x": 1.0}, {True: 1.0}, {3: 100.1}, {3: "1"}, {3: None}),
    ),
    "allowed_token_ids": ("None", ([0, 2**31 - 1],), ([], [-1], ["1"], {1}, 7)),
    "min_tokens": ("0", (16,), (2**31,)),
    "max_tokens": ("None", (1, 2**31 - 1), (2**31,)),
    "logprobs": ("0 None", (1, 20), (21,)),
    "output_kind": ("", ("cumulative", "delta", "final_only"), ("", "final", "DELTA")),
}


def refuse(name: str, value: Any, **others: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{name: value}, **others)
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name}=")
    assert "; accepted: " in str(caught.value)
    assert len(str(caught.value)) < 300
    return caught.value


def test_the_tables_cover_every_field() -> None:
    assert set(FIELDS) == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_at_every_probe_and_at_the_edges_of_its_range(name: str) -> None:
    accepted, inside, outside = FIELDS[name]
    for value in PROBES:
        if repr(value) in accepted.split():
            SamplingParams(**{name: value})
        else:
            refuse(name, value)
    for value in inside:
        SamplingParams(**{name: value})
    for value in outside:
        refuse(name, value)


def test_message_names_field_value_and_range() -> None:
    error = refuse("top_p", 1.5)
    assert str(error) == "top_p=1.5; accepted: a finite number above 0 to 1"
    assert error.value == 1.5
    assert str(refuse("max_tokens", 0)) == "max_tokens=0; accepted: an integer from 1 to 2147483647"
    assert str(refuse("output_kind", "x")) == "output_kind='x'; accepted: cumulative, delta, final_only"
    assert len(str(refuse("temperature", "x" * 10_000_000))) < 200
    assert str(refuse("logprobs", -1)) == "logprobs=-1; accepted: an integer from 0 to 20"


def test_more_than_one_completion_is_not_greedy() -> None:
    """The rule of vLLM; a temperature that generation_config.json brings counts, too."""
    for temperature in (0, 9e-6):
        with pytest.raises(ValidationError, match=r"^n=2; accepted: 1 with temperature=0: the completions") as caught:
            SamplingParams(n=2, temperature=temperature)
        assert (caught.value.param, caught.value.value) == ("n", 2)
    with pytest.raises(ValidationError, match=r"^n=2; accepted: 1 with temperature=0"):
        SamplingParams(n=2).resolve({"temperature": 0.0})
    assert SamplingParams(n=2).resolve({}).temperature == 1.0


def test_capped() -> None:
    params = SamplingParams(max_tokens=100, min_tokens=50, seed=1)
    assert params.capped(1000) == params
    assert params.capped(70) == SamplingParams(max_tokens=70, min_tokens=50, seed=1)
    assert params.capped(20) == SamplingParams(max_tokens=20, min_tokens=20, seed=1)
    assert SamplingParams(max_tokens=None, min_tokens=50).capped(20) == SamplingParams(max_tokens=20, min_tokens=20)
    with pytest.raises(ValidationError, match=r"^min_tokens=6 exceeds max_tokens=5$") as caught:
        SamplingParams(min_tokens=6, max_tokens=5)
    assert caught.value.param == "min_tokens"


def test_stop_lists_become_tuples_and_need_text() -> None:
    SamplingParams(detokenize=False, stop_token_ids=[1])
    refuse("stop", "a", detokenize=False)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop=["ab"]) == SamplingParams(stop="ab") == SamplingParams(stop=("ab",))
    assert SamplingParams().stop == ()
    assert SamplingParams(stop_token_ids=[3, 1]).stop_token_ids == (3, 1)
    mine = ["ab"]
    params = SamplingParams(stop=mine)
    mine.append("")
    assert params.stop == ("ab",)
    assert refuse("stop", ["ok", "", "bad"]).value == ["ok", "", "bad"]


def test_numbers_and_arrays_of_numpy_become_pythons_own() -> None:
    given = {"max_tokens": np.int64(4), "temperature": np.float32(0.5), "ignore_eos": np.True_, "seed": np.uint8(3)}
    params = SamplingParams(**given, stop_token_ids=np.array([3, 1]))  # type: ignore[arg-type]
    same = SamplingParams(max_tokens=4, temperature=0.5, ignore_eos=True, seed=3, stop_token_ids=[3, 1])
    assert params == same and json.dumps(dataclasses.asdict(params)) == json.dumps(dataclasses.asdict(same))
    assert refuse("max_tokens", np.float32(4)).value == 4.0
    assert json.dumps(SLO(ttft_s=np.float32(0.5)).ttft_s) == "0.5"


def test_resolve_takes_the_request_then_the_model_then_the_class() -> None:
    for name, given, default, last in (
        ("temperature", 0.0, 0.6, 1.0),
        ("top_p", 0.5, 0.9, 1.0),
        ("top_k", 0, 20, 0),
        ("min_p", 0.0, 0.1, 0.0),
        ("repetition_penalty", 1.0, 1.2, 1.0),
    ):
        unset, chosen = SamplingParams(), SamplingParams(**{name: given})  # type: ignore[arg-type]
        found = [chosen.resolve({name: default}), *map(unset.resolve, ({name: default}, {name: None}, {}))]
        assert [getattr(params, name) for params in found] == [given, default, last, last]


# Values by which a client says at length that it asks for none of it.
NEUTRAL: dict[str, tuple[Any, ...]] = {"best_of": (1,), "modalities": (["text"],), "length_penalty": (1,)} | {
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
}
BUILDERS = [lambda **fields: SamplingParams(**fields), lambda **fields: SamplingParams.from_dict(fields)]


@pytest.mark.parametrize("build", BUILDERS)
def test_an_unsupported_field_is_refused_by_name_unless_it_is_empty(build: Any) -> None:
    for name in UNSUPPORTED_FIELDS:
        neutral = NEUTRAL.get(name, ())
        for value in (2, 1.0, True, "auto", [1], {"a": 1}, 0):  # 0 prompt_logprobs are those of the prompt itself
            if value in neutral:
                continue
            with pytest.raises(UnsupportedFeatureError) as caught:
                build(temperature=0.5, **{name: value})
            assert str(caught.value) == f"{name} is not implemented; leave it out"
            assert (caught.value.param, caught.value.value) == (name, value)
        for empty in (None, False, [], {}, "", *neutral):
            assert build(seed=4, **{name: empty}) == SamplingParams(seed=4)
    assert {"response_format", "guided_json", "best_of", "prompt_logprobs"} <= set(UNSUPPORTED_FIELDS)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("temprature", "did you mean temperature?"), ("zzz", "accepted: one of allowed_token_ids, detokenize, ")],
)
def test_unknown_name_is_refused(name: str, hint: str) -> None:
    """One of another interface is known where it comes from."""
    for value, build in product((1, None), BUILDERS):
        with pytest.raises(ValidationError, match=f"^{name}={value}; ") as caught:
            build(**{name: value})
        assert hint in str(caught.value)
        assert (caught.value.param, caught.value.value) == (name, value)
    assert SamplingParams.from_dict({"max_completion_tokens": 3.0}) == SamplingParams(max_tokens=3)  # JSON has one type
    assert SamplingParams.from_dict({"max_completion_tokens": 3, "max_tokens": 5}).max_tokens == 3
    with pytest.raises(ValidationError, match=r"^max_completion_tokens=3; did you mean max_tokens\?$"):
        SamplingParams(max_completion_tokens=3)  # type: ignore[call-arg]


def test_it_is_still_a_dataclass() -> None:
    params = SamplingParams(2, 0.5, seed=3)
    assert SamplingParams(seed=-1) == SamplingParams()
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params)
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s"])
def test_slo(name: str) -> None:
    for value in (None, 1e-9, 1, 0.5, 1e9):
        assert getattr(SLO(**{name: value}), name) == value
    for value in (NAN, INF, -INF, 0, 0.0, -0.0, -1, -1e-9, "1", True, [1.0], 10**400):
        with pytest.raises(ValidationError) as caught:
            SLO(**{name: value})
        assert caught.value.param == f"slo.{name}"
        assert str(caught.value).startswith(f"slo.{name}=")
        assert str(caught.value).endswith("; accepted: a finite number above 0")


METRICS = RequestMetrics(
    arrival=10.0, first_scheduled=10.5, first_token=12.0, finished=15.0, num_prompt_tokens=100, num_output_tokens=7
)


def test_metrics() -> None:
    assert (METRICS.queue_time, METRICS.ttft, METRICS.e2e, METRICS.tpot) == (0.5, 2.0, 5.0, 0.5)
    metrics = RequestMetrics(arrival=3.0)
    assert (metrics.queue_time, metrics.ttft, metrics.e2e, metrics.tpot) == (None, None, None, None)
    assert METRICS.met_slo is metrics.met_slo is None
    found = [dataclasses.replace(METRICS, num_output_tokens=tokens).tpot for tokens in (0, 1, 2, 4)]
    assert found == [None, None, 3.0, 1.0]  # it takes two


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({"ttft_slo_s": 2.0}, True),
        ({"ttft_slo_s": 1.999}, False),
        ({"tpot_slo_s": 0.5}, True),
        ({"tpot_slo_s": 0.499}, False),
        ({"ttft_slo_s": 2.0, "tpot_slo_s": 0.4}, False),
        ({"tpot_slo_s": 0.001, "num_output_tokens": 1}, True),
        ({"ttft_slo_s": 1.0, "tpot_slo_s": 0.001, "num_output_tokens": 1}, False),
        ({"ttft_slo_s": 9.0, "finished": None}, False),
        ({"ttft_slo_s": 9.0, "first_token": None, "num_output_tokens": 0}, False),
        ({"ttft_slo_s": 2.0, "is_relegated": True}, False),
        ({"finished": None}, None),
    ],
)
def test_met_slo(changes: dict[str, Any], met: bool | None) -> None:
    assert dataclasses.replace(METRICS, **changes).met_slo is met
