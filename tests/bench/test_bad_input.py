"""What every verb of ``medha bench`` refuses, by the name of what is wrong."""

from tests.bench.shapes import ON_TINY
from tests.commands import Command


def test_bad_input(arguments: list[str], message: str, command: Command) -> None:
    takes_threads = "scaling" not in arguments and "scheduler" not in arguments
    done = command("bench", *arguments, *(ON_TINY if takes_threads else []))
    assert done.code == 2 and message in " ".join(done.err.split())
