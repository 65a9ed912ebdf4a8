"""What may import what, what is public, and what loads no torch."""

import sys
from graphlib import TopologicalSorter

import pytest

from tests.commands import run_python
from tests.house import MODULES, imported

PLAIN = {
    *("medha.errors", "medha.config", "medha.params", "medha.batch", "medha.outputs"),
    *(f"medha.config.{name}" for name in ("engine_config", "fields", "model_config", "sections")),
}


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_walk_sees_the_modules() -> None:
    assert set(MODULES) >= PLAIN | {"medha", "medha.sched", "medha.sched.scheduler", "medha.models.decoder"}
    assert "medha.sched.memory" in imported("medha.sched.scheduler", at_import=True)
    assert "medha.llm" in imported("medha", at_import=False)
    assert "medha.llm" not in imported("medha", at_import=True)


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_plain_modules_import_the_standard_library_and_each_other(name: str) -> None:
    assert {m for m in imported(name) if not inside(m, *sys.stdlib_module_names)} <= PLAIN


# What each folder, or module at the top, may import of medha, from the ground up; names that stand in one line know
# nothing of each other, and those with a star may import all of the ground. An import in a function or for type
# checking counts like any other.
_GROUND = {"errors", "batch", "outputs", "config", "params", "records"}
_TABLE = """
    timeline: batch records
    cpu:
    attention: cpu
    child: errors
    *text: child models.folder
    *models: cpu
    *parallel: attention.merge attention.staging child cpu
    *cost:
    *sched: cost
    *worker: cpu models attention parallel
    *cli: parallel.launch models.folder
    *workload: cli
    *engine: sched worker text cost cli models attention parallel
    *sim: timeline sched cost workload cli models.hf_config
    *llm: engine parallel text cli.files
    *profile: engine worker cost cli models attention parallel
    *verify: timeline engine worker cost cli models attention parallel
    *generate: timeline engine verify cli models parallel text worker.shard workload
    *serve: engine cli parallel.launch parallel.own_ranks generate child sched.decision
    *bench: llm engine worker sched cost profile workload sim.replica cli models attention parallel
    : llm engine params outputs
    __main__: bench cli cost errors generate profile serve sim verify workload engine.replay
"""
MAY_IMPORT = {name: _GROUND - {name} for name in sorted(_GROUND)}
for _line in _TABLE.strip().splitlines():
    _name, _, _names = _line.strip().partition(":")
    MAY_IMPORT[_name.lstrip("*")] = {*_names.split(), *(_GROUND if _name.startswith("*") else ())}


def folder_of(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


def test_the_table_has_every_folder() -> None:
    assert {folder_of(name) for name in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_downwards(folder: str) -> None:
    allowed = {f"medha.{name}" for name in (*MAY_IMPORT[folder], folder) if name}
    upwards = [
        f"{name} imports {other}"
        for name in MODULES
        if folder_of(name) == folder
        for other in sorted(imported(name, at_import=False))
        if inside(other, "medha") and not inside(other, *allowed)
    ]
    assert upwards == []


def test_there_is_no_circle() -> None:
    """Among imports, nor in the table itself; the error names it."""
    TopologicalSorter({name: imported(name, at_import=True) & set(MODULES) for name in MODULES}).prepare()
    folders = {name: names for name, names in MAY_IMPORT.items() if name not in _GROUND}
    TopologicalSorter({name: {m.partition(".")[0] for m in names} for name, names in folders.items()}).prepare()


_REPLAYS = ("medha.engine.journal", "medha.engine.replay")


@pytest.mark.parametrize("name", [m for m in MODULES if inside(m, "medha.sched", "medha.cost", *_REPLAYS)])
def test_the_scheduler_imports_numpy_at_most(name: str) -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "medha"}
    assert {m for m in imported(name, at_import=True) if not inside(m, *allowed)} == set()


HEAVY = {"torch", "tokenizers", "safetensors", "transformers", "huggingface_hub", "rich", "typer"}
LIGHT = ("sched.scheduler", "engine.jsonl", "cost.hardware", "sim.replica", "timeline", "workload.io", "workload.synth")


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (f"import medha, {', '.join([*sorted(PLAIN), *(f'medha.{name}' for name in LIGHT)])}", HEAVY),
        (f"import medha, {', '.join(sorted(PLAIN))}", {"numpy"}),
        ("from medha import SLO, SamplingParams; SamplingParams(), SLO()", {"torch"}),
    ],
    ids=["light modules", "plain modules", "a request"],
)
def test_what_is_light_loads_nothing_heavy(code: str, unwanted: set[str]) -> None:
    done = run_python("-c", f"{code}; import sys; print(sorted({unwanted} & set(sys.modules)))")
    assert done.stdout == "[]\n", done.stderr
