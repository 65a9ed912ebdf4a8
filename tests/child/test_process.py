"""A child that answers: errors, deaths, interrupts, threads, and that it goes with whoever asked it."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from medha.child import process
from medha.child.process import Child, ChildError, popen_module
from tests.commands import wait_until

ECHO = """
import os, signal, sys, time
from medha.child.process import ChildError
from medha.child.serving import serve

def refuse(why):
    raise ChildError(why)

def answering(first):
    return lambda message: eval(message[1:], globals(), {"first": first}) if message[:1] == b"=" else message

if __name__ == "__main__":
    serve(answering)
"""
"""Answers with the message, or with the value of the expression behind a ``=``."""
PID = b"=str(os.getpid()).encode()"
SLEEP = b"=time.sleep(60)"


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Child]:
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda **options: Child("echo_child", **options)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
def test_answers_of_any_size(echo: Callable[..., Child], size: int) -> None:
    data = (b"!" + os.urandom(size))[:size]  # no expression
    assert echo().ask(data) == data


def test_what_is_raised_is_an_answer(echo: Callable[..., Child]) -> None:
    child = echo()
    pid = child.ask(PID)
    with pytest.raises(ChildError, match=r"^no$"):
        child.ask(b"=refuse('no')")
    with pytest.raises(ChildError, match=r"^SystemExit: x+$") as caught:
        child.ask(b"=sys.exit('x' * 10_000)")
    assert len(str(caught.value)) == 1000
    assert child.ask(PID) == pid


@pytest.mark.parametrize(("message", "end"), [(b"=os.abort()", "SIGABRT"), (b"=os._exit(7)", "exit status 7")])
def test_after_a_death_there_is_another(echo: Callable[..., Child], message: bytes, end: str) -> None:
    child = echo(setup=lambda: b"hello")
    first = child.ask(PID)
    with pytest.raises(ChildError, match=rf"^the process ended with {end}$"):
        child.ask(message)
    assert child.ask(PID) != first
    assert child.ask(b"=first") == b"hello"


def test_a_child_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChildError, match="exit status 1"):
        Child("no.such.module").ask(b"")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ChildError, match=r"cannot be started: .*No such file"):
        Child("json").ask(b"")


def test_signals_are_the_parents(echo: Callable[..., Child]) -> None:
    """A terminal, or whatever ends a server, sends them to a whole group of processes."""
    assert echo().ask(b"=[os.kill(os.getpid(), number) for number in (2, 15)] and b'here'") == b"here"


def too_late(*_: object) -> None:
    raise TimeoutError  # an OSError, as that of a pipe


@pytest.mark.parametrize("handler", [signal.default_int_handler, too_late])
def test_an_interrupt_leaves_no_answer_behind(echo: Callable[..., Child], handler: Callable[..., object]) -> None:
    child = echo()
    pid = int(child.ask(PID))
    former = signal.signal(signal.SIGINT, handler)
    with pytest.raises((KeyboardInterrupt, TimeoutError)):
        child.ask(b"=(os.kill(os.getppid(), signal.SIGINT), time.sleep(60))")
    signal.signal(signal.SIGINT, former)
    assert not is_there(pid)
    assert child.ask(b"again") == b"again"


def test_it_goes_with_its_owner(echo: Callable[..., Child]) -> None:
    gc.collect()
    fds = os.listdir("/proc/self/fd")
    child = echo()
    pid = int(child.ask(PID))
    del child
    gc.collect()
    assert not is_there(pid)
    assert len(os.listdir("/proc/self/fd")) == len(fds)


def test_a_forked_process_has_one_of_its_own(echo: Callable[..., Child]) -> None:
    child = echo()
    pid, (reader, writer) = child.ask(PID), os.pipe()
    if not (forked := os.fork()):
        os.write(writer, child.ask(PID))
        del child
        gc.collect()
        os._exit(0)
    os.waitpid(forked, 0)
    assert os.read(reader, 20) != pid == child.ask(PID)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("message", [b"", SLEEP])
def test_it_goes_with_a_parent_that_is_killed(tmp_path: Path, message: bytes) -> None:
    """Also in the middle of an answer."""
    (tmp_path / "echo_child.py").write_text(ECHO)
    code = f"""
from medha.child.process import Child
child = Child("echo_child")
print(child.ask({PID}).decode(), flush=True)
child.ask({message})
input()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_there(pid)
        parent.kill()
    wait_until(lambda: not is_there(pid))


@pytest.mark.parametrize("end", [Child.interrupt, Child.close])
def test_an_answer_waited_for_can_be_given_up(echo: Callable[..., Child], end: Callable[[Child], object]) -> None:
    child = echo()
    end(child)  # there is none
    pid = int(child.ask(PID))
    end(child)  # nobody waits
    assert is_there(pid) == (end is Child.interrupt)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(child.ask, SLEEP)
        wait_until(lambda: child._process is not None and child._lock.locked())
        end(child)
    with pytest.raises(ChildError, match="SIGKILL"):
        asked.result()
    assert child.ask(b"more") == b"more"


def test_an_answer_can_be_given_up_while_its_child_starts(
    echo: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = echo()
    started = lambda *args, **options: (child.interrupt(), popen_module(*args, **options))[1]  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(process, "popen_module", started)
        with pytest.raises(ChildError, match="given up"):
            child.ask(SLEEP)
    assert child.ask(b"more") == b"more"


def test_children_that_have_ended_leave_nothing(echo: Callable[..., Child]) -> None:
    """Also one that was killed while nobody asked: the next message goes to another."""
    gc.collect()  # those of tests before
    child, before = echo(), len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for _ in range(2):
        pid = int(child.ask(PID))
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # until its last thread has gone
        assert child.ask(b"hello") == b"hello"
        with pytest.raises(ChildError):
            child.ask(b"=os.abort()")
    assert len(weakref.finalize._registry) == before  # type: ignore[attr-defined]
