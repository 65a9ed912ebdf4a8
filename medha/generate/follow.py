"""``python -m medha.generate.follow OPTIONS``: a rank behind the first one, which started it and tells it what to run.

A rank that torchrun has started calls :func:`follow` with what its own command line says.
"""

from __future__ import annotations

import gc
import json
import sys

from medha.cli.command import end_process, ignore_signals, lossy, run_guarded, start_logging, state_on_signal
from medha.config import EngineConfig
from medha.engine.build import build_role


def follow(config: EngineConfig) -> int:
    """Be this rank's part of an engine until rank 0 closes it; returns the exit code."""
    role = build_role(config)
    gc.freeze()  # what torch and the model have made stays: going through it would hold up every batch
    ignore_signals()  # from here on rank 0 tells this rank when to stop
    with state_on_signal(role.describe):
        role.close()
    return 0


if __name__ == "__main__":
    sys.stderr, _ = lossy(sys.stderr)
    start_logging("warning")
    end_process(run_guarded(lambda: follow(EngineConfig.from_flat(**json.loads(sys.argv[1])))))
