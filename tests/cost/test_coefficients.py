"""Coefficients as data: what is refused, and the JSON form with its key."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given

from medha.cost.coefficients import Coefficients, Curve, DecodeAttention, Line
from medha.errors import ConfigError
from tests.sched.costs import KEY, PLAIN, changed, coefficients


@given(coefficients())
def test_json_gives_back_the_same(stage: Coefficients) -> None:
    assert Coefficients.from_json(stage.to_json()) == stage


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PLAIN.to_json())
    assert Coefficients.load(path, expected=KEY) == PLAIN
    with pytest.raises(ConfigError, match=r"profile .*none\.json cannot be read"):
        Coefficients.load(tmp_path / "none.json")
    with pytest.raises(ConfigError) as caught:
        Coefficients.load(path, expected=dataclasses.replace(KEY, model="another", num_threads=8))
    assert str(caught.value) == (
        f"profile {path} was measured for something else: "
        "model is 'llama 4x64', running 'another'; num_threads is 2, running 8"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "accepted: a file of format 'medha-coefficients', version 1"),
        (changed(PLAIN, "version", 2), "version 1"),
        (changed(PLAIN, "linear", ...), "the file lacks linear"),
        (changed(PLAIN, "linear", None), "linear is None; accepted: an object"),
        (changed(PLAIN, "linear.z", 1), "linear has unknown fields z; known: x, y"),
        (changed(PLAIN, "linear.y", [1.0]), r"curve\.y=\(1\.0,\); accepted: 4 numbers"),
        (changed(PLAIN, "chunks.a_s", [1e-3, 0.0, 1.0, 1.0]), r"chunks\.a_s falls"),
        (changed(PLAIN, "chunks.b_s", [1e-3, "x", 1.0, 1.0]), r"chunks\.b_s='x'; accepted: a finite number of"),
        (changed(PLAIN, "chunks.tile", 0), r"chunks\.tile=0"),
        (changed(PLAIN, "chunks.tokens", [0.0, 2.0, 3.0, 4.0]), r"chunks\.tokens=0\.0; accepted: a finite number"),
        (changed(PLAIN, "host_s", math.nan), "host_s=nan"),
        (changed(PLAIN, "splits_kv", 1), "splits_kv=1; accepted: true or false"),
        (changed(PLAIN, "key.num_threads", "2"), "num_threads='2'; accepted: a whole number"),
    ],
)
def test_a_bad_file_is_a_named_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Coefficients.from_json(text)


def test_tables_are_checked_and_the_tail_is_the_mean_slope_of_the_upper_half() -> None:
    for make, message in (
        (lambda: Curve((), ()), r"curve\.x=\(\); accepted: some numbers"),
        (lambda: Curve((2.0, 2.0), (1.0, 1.0)), r"curve\.x falls; accepted: increasing sizes"),
        (lambda: DecodeAttention((1.0,), (1.0,), (1.0,), short_kv=8.0), r"decodes\.short_a_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    assert DecodeAttention((1.0, 2.0), (2.0, 1.0), (1.0, 0.5)).a_s == (2.0, 1.0)  # may fall with the batch
    assert Line.of(Curve((1.0, 2.0, 3.0, 4.0), (0.0, 5.0, 6.0, 6.0))).slope[-1] == 0.5
    assert Line.of(Curve((1.0, 4.0), (2.0, 2.0))).slope[-1] == 0.5  # flat: in proportion
