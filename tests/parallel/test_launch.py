"""What is refused before a job begins: variables, layout, ranks that differ, an address of no use."""

import os
import re
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from medha import LLM, SamplingParams
from medha.errors import ConfigError
from medha.parallel.launch import read_launch
from medha.parallel.own_ranks import launch_environment, own_ranks, reserved_port
from medha.worker import shard
from tests.commands import wait_until
from tests.parallel.faults import Start
from tests.parallel.workers import WorkerPool

# -- the environment (D2) --------------------------------------------------------------------------------------------

WHOLE = launch_environment(1, 2, 29500)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "one"}, "must be integers"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999; accepted"),
        ({"MASTER_PORT": None}, "but not MASTER_PORT; accepted: all of them"),
        ({"RANK": None, "WORLD_SIZE": None}, "but not RANK, WORLD_SIZE; accepted: all of them"),
    ],
)
def test_environment_of_no_use(change: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_launch({name: value for name, value in (WHOLE | change).items() if value is not None})


def test_no_launcher_is_a_single_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a job of one more, whatever its address: it meets nobody."""
    assert read_launch({}) is None
    assert read_launch({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) is None
    launch = read_launch(WHOLE)
    assert (launch.rank, launch.world_size, launch.host, launch.port) == (1, 2, "127.0.0.1", 29500)
    for name, value in (launch_environment(0, 1, 29500) | {"MASTER_ADDR": "nowhere.invalid"}).items():
        monkeypatch.setenv(name, value)
    with LLM(model, num_kv_blocks=8) as llm:
        assert len(list(llm.stream("a", SamplingParams(max_tokens=2, ignore_eos=True)))) >= 2


def test_cores_are_those_that_the_ranks_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of whoever started them: one rank may be bound to a part."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8 if pid == 77 else 3))
    launch = read_launch(WHOLE)
    assert replace(launch, agent_pid=77).spare_cores(2) == 8 - 2 * 2
    assert replace(launch, agent_pid=None).spare_cores(2) == 3 - 2 * 2


def threads(rank: int) -> None:
    """Of a command that starts ranks, where a number is given and where none is."""
    os.sched_getaffinity = lambda pid: range(6)  # type: ignore[assignment, misc]
    for given in ({"OMP_NUM_THREADS": "1"}, {}):
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(given)
        with own_ranks(2, ["keyword"]):
            print(os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), "TORCHELASTIC_USE_AGENT_STORE" in os.environ)


def test_a_command_that_has_torch_already_takes_its_share_of_the_threads(start: Start) -> None:
    """Also where a rank of another job starts it."""
    job = start(1, threads, environment={"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert job.end_well() == ["1 1 False\n3 3 False\n"]


def test_an_agent_that_holds_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as torch reads what its agent has set."""
    written = Path(local_elastic_agent.__file__).read_text()
    (name,) = re.findall(r'"(TORCHELASTIC_\w*STORE)": str', written)
    for value in ("True", "False"):
        monkeypatch.setenv(name, value)
        launch = read_launch({**WHOLE, name: value})
        assert launch.agent_has_store == _torchelastic_use_agent_store()


# -- the layout (D1), and ranks that differ (D3) ---------------------------------------------------------------------


def refusal(model: Path, options: dict[str, Any], others: dict[str, Any]) -> str:
    """What building the LLM raises on this rank, of which those behind the first may have another model, version or
    options; loading a weight would be an error of its own."""
    given = {"model": model, "version": "1", **options} | (others if int(os.environ["RANK"]) else {})
    with (
        patch("medha.parallel.mesh.version", return_value=given.pop("version")),
        patch.object(shard, "load_model", side_effect=AssertionError("weights are read")),
        patch("medha.parallel.health.Monitor.linger", return_value=True),  # for rank 0's end, which never comes
        pytest.raises(ConfigError) as caught,
    ):
        LLM(num_kv_blocks=8, **given)
    wait_until(
        lambda: not any(thread.name in ("medha-watch", "medha-talk") for thread in threading.enumerate()),
        told=lambda: "a job that never began is still watched",
    )
    return f"{caught.typename}: {caught.value}"


PRODUCT = "tp=4 x spp=1 x kvp=1 is 4 ranks, and 2 were started; accepted: degrees whose product is 2"
POOL = "max_kv_per_group=2304; accepted: at most the pool's 2048 tokens"
DIFFER = "ConfigError: ranks [1] differ from rank 0 in: "


@pytest.mark.parametrize(
    ("options", "others", "message"),
    [
        ({"tp": 4}, {}, f"ParallelConfigError: {PRODUCT}"),
        ({"tp": 2, "hf_overrides": {"intermediate_size": 97}}, {}, "ParallelConfigError: tp=2 does not divide"),
        ({"kvp": 2, "max_kv_per_group": 9 * 256}, {}, f"ConfigError: {POOL}"),
        ({"spp": 2}, {"seed": 1}, f"{DIFFER}seed; accepted: the same on every rank"),
        ({"spp": 2}, {"version": "2"}, f"{DIFFER}version of medha"),
        ({"spp": 2}, {"model": "other"}, f"{DIFFER}model, checkpoint"),
    ],
)
def test_a_job_that_cannot_begin_is_refused_alike_on_every_rank(
    workers: WorkerPool, model: Path, tmp_path: Path, options: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    """D1: the layout; D3: what differs between ranks, as weights of the same config.json."""
    if "model" in others:
        others = {"model": shutil.copytree(model, tmp_path / others["model"])}
        tensors = load_file(model / "model.safetensors")
        save_file({name: 2 * tensor for name, tensor in tensors.items()}, others["model"] / "model.safetensors")
    (said,) = set(workers.run(refusal, 2, model, options, others))
    assert message in said


def test_no_torchrun_prints_the_command(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="start it as: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2"):
        LLM(model, tp=2)


@pytest.mark.parametrize(
    ("local", "odd"), [({"LOCAL_RANK": "0"}, [0, 1]), ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None)]
)
def test_ranks_that_do_not_make_a_node(start: Start, model: Path, local: dict[str, str], odd: list[int] | None) -> None:
    """As of SLURM with one GPU a task, or of torchrun --virtual-local-rank: one would wait for memory to share."""
    job = start(2, joining, model, environment=local)
    assert job.wait(60.0) == [2 * bool(odd)] * 2, job.stderr(0)
    for rank in (0, 1) if odd else ():
        assert job.stdout(rank).startswith(f"LOCAL_RANK and LOCAL_WORLD_SIZE of ranks {odd} make no node of them; ")


# -- the address (D12) -----------------------------------------------------------------------------------------------


def test_a_reserved_port_is_the_stores_and_nobody_elses() -> None:
    with reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("a", "b")
        assert TCPStore("127.0.0.1", port, wait_for_workers=False).get("a") == b"b"


def joining(rank: int, folder: Path) -> None:
    try:
        LLM(folder, spp=2, num_kv_blocks=8, dist_timeout=3)
    except ConfigError as error:
        print(error, flush=True)
        os._exit(2)


@pytest.mark.parametrize("case", ["alone", pytest.param("no such host", marks=pytest.mark.slow), "port in use"])
def test_address_of_no_use(model: Path, start: Start, case: str) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        address = {"no such host": "nowhere.invalid"}.get(case, "127.0.0.1")
        rank, port = (1 if case == "no such host" else 0), listener.getsockname()[1]
        env = {"MASTER_ADDR": address} | ({} if case == "alone" else {"MASTER_PORT": str(port)})
        job = start(2, joining, model, environment=env, ranks=[rank])
        assert job.wait(100.0) == [2], job.stderr(rank)  # before the timeout that there is without the option
    assert f"at {address}:" in job.stdout(rank) or f"to {address}:" in job.stdout(rank)
