"""What the ranks run on: versions and devices, which must be the same everywhere."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from medha.cost.machine import environment
from medha.verify.rows import FAIL, PASS, Crew, Row

_VERSIONS = ("medha", "python", "torch", "CUDA", "NCCL")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Versions and device of this rank."""
    facts = environment()
    return {
        "medha": facts["medha"],
        "python": facts["python"],
        "torch": facts["packages"]["torch"],
        "CUDA": facts["cuda"],
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "host": socket.gethostname(),
        "threads": facts["threads"],
        **_device_facts(device, facts),
    }


def machine_rows(crew: Crew, device: torch.device) -> Iterator[Row]:
    """Whether versions and kinds of device are the same on all ranks, and no two ranks share a GPU."""
    yield from rows_of(crew.gather("machine", machine_facts(device)))


def rows_of(facts: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """The rows of what the ranks have found, rank 0's first."""
    versions = ", ".join(f"{name} {facts[0][name]}" for name in _VERSIONS if facts[0][name] is not None)
    yield _compared("environment", versions, facts, _VERSIONS)
    num_hosts = len({fact["host"] for fact in facts})
    where = "1 node" if num_hosts == 1 else f"{num_hosts} nodes"
    threads = facts[0]["threads"]
    what = f"{facts[0]['kind']}, {threads} CPU thread{'s' if threads > 1 else ''} a rank, {where}"
    shared = [gpu for gpu, count in Counter(fact["gpu"] for fact in facts if fact["gpu"]).items() if count > 1]
    if shared:
        yield Row("devices", what, f"ranks share {', '.join(shared)}", "one rank a GPU", FAIL)
    else:
        yield _compared("devices", what, facts, ("kind",))


def _compared(check: str, what: str, facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Row:
    odd = [rank for rank, fact in enumerate(facts) if any(fact[name] != facts[0][name] for name in names)]
    if odd:
        differing = ", ".join(name for name in names if any(facts[rank][name] != facts[0][name] for rank in odd))
        return Row(check, what, f"ranks {', '.join(map(str, odd))} differ in {differing}", "the same", FAIL)
    return Row(check, what, "1 rank" if len(facts) == 1 else f"same on {len(facts)} ranks", "the same", PASS)


def _device_facts(device: torch.device, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of device, and which GPU it is."""
    if device.type != "cuda":
        return {"kind": f"{facts['cpu'] or 'cpu'}", "gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {"kind": properties.name, "gpu": f"GPU {properties.uuid} of {socket.gethostname()}"}
