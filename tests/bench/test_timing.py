"""The machine's rates at toy sizes: what they are made of."""

import pytest
import torch

from medha.bench.timing import in_turn, matrix_product

CPU = torch.device("cpu")


@pytest.mark.usefixtures("_small_rates")
@pytest.mark.parametrize(("has_it", "computed"), [(True, torch.float16), (False, torch.float32)])
def test_16_bits_without_a_kernel_for_them_are_measured_in_32(
    has_it: bool, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[torch.dtype]()
    monkeypatch.setattr("medha.bench.timing.onednn_has", lambda dtype: has_it)
    monkeypatch.setattr(torch, "mm", lambda left, right, out: seen.update((left.dtype, right.dtype, out.dtype)))
    matrix_product(torch.float16, CPU).seconds()
    assert seen == {computed}


def test_contestants_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []

    def contestant(name: str, start_s: float) -> float:
        calls.append(name)
        return start_s + len(calls)

    contestants = {"a": lambda: contestant("a", 10.0), "b": lambda: contestant("b", 20.0)}
    seconds = in_turn(contestants, warmup=1, runs=2)
    assert "".join(calls) == "ababab"
    assert seconds == {"a": [13.0, 15.0], "b": [24.0, 26.0]}
