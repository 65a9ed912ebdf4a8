"""Tests of :mod:`examples.reproduce`."""

import numpy as np
import numpy.typing as npt

from examples.reproduce.load import Served
from medha.sim.outcome import Gaps
from medha.workload.trace import Trace


def made_up(trace: Trace, ttft_s: npt.ArrayLike, *, end_s: float, decode_s: npt.ArrayLike = 0.0) -> Served:
    """A play in which requests wait and decode for so long; NaN is a request without a first token."""
    first_s = trace.arrival_s + np.asarray(ttft_s)
    first_s = np.where(first_s <= end_s, first_s, np.nan)
    finish_s = first_s + np.asarray(decode_s)
    return Served(trace, first_s, np.where(finish_s <= end_s, finish_s, np.nan), end_s, Gaps())
