"""The parity suite notices the errors it is there for: each seeded defect must turn it red."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

import medha.attention.torch_backend as torch_backend
from medha.attention.interface import Segment
from medha.attention.merge import merge_partials
from medha.attention.torch_backend import TorchBackend
from medha.batch import Batch
from medha.worker.runner import Runner
from tests.engines import make_engine, run_to_end
from tests.test_parity import NUM_TOKENS, Case, case  # noqa: F401

LOG2_E = 1.4426950408889634
plan = TorchBackend.plan
positions = Runner._positions


def check_parity(case: Case) -> None:  # noqa: F811
    """The shortest form of the parity test: three prompts, small chunks, small blocks."""
    engine = make_engine(case.decoder, chunk_size=37, max_batch_tokens=96, block_size=16, num_blocks=100)
    assert run_to_end(engine, case.prompts[3:], NUM_TOKENS) == case.expected[3:]


def base_2_lse(patch: pytest.MonkeyPatch) -> None:
    def merge(partials: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return merge_partials([(out, lse * LOG2_E) for out, lse in partials])

    patch.setattr(torch_backend, "merge_partials", merge)


def dropped_block(patch: pytest.MonkeyPatch) -> None:
    def without_first_block(segment: Segment) -> Segment:
        (first, count), *rest = segment.ranges
        drops = segment.kv_len - segment.q_len >= 16 and count > 16
        return replace(segment, ranges=((first + 16, count - 16), *rest)) if drops else segment

    patch.setattr(TorchBackend, "plan", lambda self, segments: plan(self, [without_first_block(s) for s in segments]))


def shifted_extent(patch: pytest.MonkeyPatch) -> None:
    def shifted(segment: Segment) -> Segment:
        (first, count), *rest = segment.ranges
        return replace(segment, ranges=((first + 1, count), *rest)) if segment.kv_len > segment.q_len else segment

    patch.setattr(TorchBackend, "plan", lambda self, segments: plan(self, [shifted(s) for s in segments]))


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """In every chunk but the first: a shift of all positions alike would be invisible to RoPE."""

    def shifted(self: Runner, batch: Batch) -> npt.NDArray[np.int64]:
        later = np.concatenate([np.full(row.q_len, int(row.position > 0)) for row in batch.rows])
        return positions(self, batch) + later

    patch.setattr(Runner, "_positions", shifted)


def test_parity_holds_without_mutation(case: Case) -> None:  # noqa: F811
    check_parity(case)


@pytest.mark.parametrize("mutate", [base_2_lse, dropped_block, shifted_extent, position_off_by_one])
def test_mutation_turns_parity_red(
    case: Case,  # noqa: F811
    mutate: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_parity(case)
