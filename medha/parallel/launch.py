"""What the launcher (torchrun) says about this process; the only module that reads what it sets. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from medha.errors import ConfigError

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among the job's.

    Attributes:
        rank, world_size: global.
        local_rank, local_world_size: on this node.
        address: where the ranks meet, host:port; differs between jobs that run at once.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """What torchrun set, or None for a plain Python process.

    Raises:
        ConfigError: only some of the variables are set, or one is no number.
    """
    env = os.environ if environ is None else environ
    missing = [name for name in _TORCHRUN_VARIABLES if name not in env]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if missing:
        raise ConfigError(f"the environment sets some of torchrun's variables, but not {', '.join(missing)}")
    try:
        return Launch(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            address=f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        )
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be integers: {error}") from error


def is_first_rank() -> bool:
    """Whether this process may speak to the user: rank 0, or a plain Python process."""
    return os.environ.get("RANK", "0") == "0"
