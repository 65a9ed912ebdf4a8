"""``medha serve`` as a process: it starts, drains on a signal, and says what it cannot do."""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from medha.errors import ConfigError, ValidationError
from medha.parallel.own_ranks import reserved_port
from medha.serve.keys import Key, key_of, load_keys
from medha.serve.web import bound, host_names, listening
from tests.commands import Command
from tests.serve.process import Process, last_events, serving, streams_under_load
from tests.serving import Model

SMALL = ("--max-model-len", "4096", "--num-kv-blocks", "64", "--num-threads", "1")
LOADED = ["--max-model-len", "65536", "--num-kv-blocks", "8192", "--max-num-seqs", "4", "--num-threads", "1"]
LOADED += ["--hf-overrides", '{"max_position_embeddings": 65536}']


def test_a_signal_lets_running_requests_end_and_takes_no_more(bytes_model: Model, tmp_path: Path) -> None:
    options = ("--served-model-name", "small", "--shutdown-timeout", 300)
    with serving(tmp_path / "log", bytes_model.folder, *LOADED, *options) as server:
        assert json.loads(server.ask("GET", "/v1/models").read())["data"][0]["id"] == "small"
        answers = streams_under_load(server, 300)
        endless = server.complete("hello", 60_000, stream=True)  # so that the server is there until this one leaves
        server.process.send_signal(signal.SIGTERM)
        while server.ask("GET", "/ready").status == 200:
            pass
        refused = server.complete("hello", 1)
        assert refused.status == 503 and refused.headers["retry-after"] == "1"
        endless.close()
        for answer in answers:
            event, done = last_events(answer)
            assert event["choices"][0]["finish_reason"] == "length" and done == b"data: [DONE]"
        assert server.wait() == 0


@pytest.mark.parametrize(("num_signals", "code"), [(1, 0), (2, 130)], ids=["no time", "twice"])
def test_streams_that_a_signal_cuts_end_with_an_error(bytes_model: Model, num_signals: int, code: int) -> None:
    """And a log that cannot be written, as the disk that holds it is full, loses no request."""
    options = ("--shutdown-timeout", 0 if num_signals == 1 else 300, "--log-level", "debug")
    with (
        reserved_port() as port,
        serving(Path("/dev/full"), bytes_model.folder, *LOADED, *options, port=port) as server,
    ):
        assert server.ask("POST", "/v1/completions", {"prompt": 3}).status == 400
        answers = streams_under_load(server, 8000)
        server.process.send_signal(signal.SIGINT)
        if num_signals == 2:
            while server.ask("GET", "/ready").status == 200:  # two signals that are pending are one
                pass
            server.process.send_signal(signal.SIGINT)
        for answer in answers:
            event, done = last_events(answer)
            assert event["error"]["code"] == "server_stopped" and done == b"data: [DONE]"
        assert server.wait() == code


@pytest.mark.parametrize(("hard", "warnings", "soft"), [(350, 1, 350), (500, 0, 356)])
def test_files_for_the_connections(
    command: Command, monkeypatch: pytest.MonkeyPatch, hard: int, warnings: int, soft: int
) -> None:
    limits = [(300, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    done = command("serve", "/nowhere", "--port", 0, "--max-connections", 100)
    assert (done.code, limits[-1], done.err.count("needs 356 open files")) == (2, (soft, hard), warnings)


def test_a_port_that_is_taken_is_said_before_the_model_is_read(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("serve", "/nowhere", "--port", port)
    assert done.code == 2
    assert f"127.0.0.1:{port} cannot be listened at: Address already in use" in done.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[a]\nkey = 3", "[a] key=3; accepted: text that is not empty"),
        ("[a]", "[a] has no key"),
        ('[""]\nkey = "x"', "has no key or no name"),
        (["--host", "a..b"], "a..b:0 cannot be listened at: "),
        ('[a]\nkey = " "', "accepted: text that is not empty"),
        ('[a]\nkey = "x"\nttft_s = 1\nleast_ttft_s = 2', "[a] slo.ttft_s=1; accepted: at least 2"),
        ('[a]\nkey = "x"\ntenant = "b"', "[a] "),
        ("a = 3", "[a] "),
        ('[a]\nkey = "x"\nttft = 1', "[a] ttft=1; did you mean ttft_s?"),
        ('[a]\nkey = "x"\nttft_s = -1', "[a] ttft_s=-1; accepted: a finite number above 0"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "two API keys are the same"),
        ('[alice]\nkey = "k"\n[bob]\nkey = " k"', "two API keys are the same"),
        ("[a", "key file"),
        ("", "has no keys"),
        (["--api-key", ""], "key=''; accepted: text that is not empty"),
        (["--allowed-host", ""], "allowed_host=''; accepted: a host name"),
        (["--allowed-host", "x", "--allowed-host", "http://x"], "allowed_host='http://x'; accepted: a host name"),
        (["--served-model-name", ""], "a served_model_name is empty"),
        (["--ssl-certfile", "x"], "one of ssl_keyfile and ssl_certfile is given"),
    ],
)
def test_what_would_leave_a_server_open(command: Command, tmp_path: Path, given: str | list[str], said: str) -> None:
    """A key file of this text, or options."""
    keys = tmp_path / "keys.toml"
    if isinstance(given, str):
        keys.write_text(given)
    done = command("serve", "/nowhere", "--port", 0, *(["--key-file", keys] if keys.exists() else given))
    assert done.code == 2 and said in done.err


def test_hosts_are_named_as_requests_name_them() -> None:
    given = ["LLM.example:8000", "::1", "[::1]:80", "127.0.0.1"]
    assert host_names(given) == ("llm.example", "[::1]", "[::1]", "127.0.0.1") and host_names(["x", "*"]) == ()


def test_what_a_key_decides_of_a_request() -> None:
    """One of a command line says nothing of it, one of a file its tenant, and its class unless the body does."""
    plain, named = load_keys(["x"], None)[0], Key("a", key="y", priority="high")
    body = {"tenant": "b"}
    assert plain.objectives(body, {}) == {"slo": {"ttft_s": None, "tpot_s": None}, "priority": None, "tenant": "b"}
    assert named.objectives(body, {}) | {"slo": 0} == {"slo": 0, "priority": "high", "tenant": "a"}
    plain.check(None, "realtime")
    for key, priority in ((named, "realtime"), (Key("b", key="z"), "high")):
        with pytest.raises(ValidationError, match="or less urgent, with this API key"):
            key.check(None, priority)
    spelt = Key("a", key="voilà")
    assert key_of([spelt], b"Bearer voil\xc3\xa0".decode("latin-1")) is spelt


def test_a_certificate_that_is_none_and_a_port_that_two_have_bound(tmp_path: Path) -> None:
    with bound("127.0.0.1", 0) as one, bound("127.0.0.1", one.getsockname()[1]) as other:
        one.listen()
        none = dict.fromkeys(("ssl_certfile", "ssl_keyfile"), tmp_path / "none")
        for listener, certificate in ((one, none), (other, {})):
            with pytest.raises(ConfigError, match="the server does not start"):
                listening(print, listener, max_connections=1, **certificate).__enter__()


def test_a_stall_ends_streams_and_the_server(bytes_model: Model, tmp_path: Path) -> None:
    """Requests wait, and no batch completes, since a step hangs. While the server itself is stopped no time passes."""
    code = (
        "import time, medha.engine.engine as engine\n"
        "complete = engine.Engine._complete\n"
        "def hanging(self, index):\n"
        "    if any(row.kv_len > 100 for row in self._in_flight[index].batch.rows):\n"
        "        time.sleep(600)\n"
        "    complete(self, index)\n"
        "engine.Engine._complete = hanging\n"
        "import runpy\n"
        "runpy.run_module('medha.serve', run_name='__main__')"
    )
    options = (bytes_model.folder, *SMALL, "--stall-timeout", 2, "--port", 0)
    with Process(tmp_path / "log", [sys.executable, "-c", code, *map(str, options)]) as server:
        time.sleep(3)  # an idle server is no stall
        answer = server.complete("hello", 80, stream=True)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        server.process.send_signal(signal.SIGCONT)
        assert last_events(answer)[0]["choices"][0]["finish_reason"] == "length"
        event, done = last_events(server.complete("hello", 1000, stream=True))
        assert event["error"]["code"] == "engine_dead" and done == b"data: [DONE]"
        assert server.wait() == 4
        assert "no batch has completed for 2 s" in server.log.read_text()


def test_a_package_that_is_missing_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medha.serve.__main__.find_spec", lambda name: None if name == "uvicorn" else object())
    done = command("serve", "/nowhere")
    assert done.code == 2 and "the server needs uvicorn; install medha[serve]" in done.err


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("MEDHA_API_KEY", " ")
    done = command("serve", "/nowhere", "--port", "0")
    assert done.code == 2 and "MEDHA_API_KEY is empty" in done.err
