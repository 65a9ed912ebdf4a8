"""Clients that leave, send nonsense, ask for more than they may or read slowly; an engine that fails."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from medha.child import process
from medha.child.process import Child
from medha.config import EngineConfig
from medha.engine.jsonl import KNOWN_FIELDS
from medha.engine.request import Completion
from medha.errors import NonFiniteLogitsError, ValidationError
from medha.serve import app, service, web
from medha.serve.keys import Key
from medha.text import Tokenizer
from tests.commands import LIMIT_S, wait_until
from tests.engines import build_engine
from tests.serve.conftest import CHAT, HEALTH, PATH, Server, Start, asked, asked_in_chat, received, sent, served
from tests.serving import Model, assert_empty, fail_in_run, random_ids

RIGHT = {"authorization": "Bearer right"}


def num_aborted(server: Server) -> float:
    """Requests that have ended as their clients left."""
    found = re.search(r'request_success_total\{finished_reason="abort",.*\} (\S+)', server.get("/metrics")[1])
    return 0.0 if found is None else float(found[1])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("phase", "behind", "later"), [("prefill", 0, 0), ("decode", 0, 0), ("decode", 2, 0), ("decode", 0, 2)]
)
def test_a_client_that_leaves_aborts_its_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: Any, phase: str, stream: bool, behind: int, later: int
) -> None:
    """The engine is held after a step of it, until the server has noticed; also where further requests wait behind."""
    note, begun, may_go_on = server.engine.on_step, threading.Event(), threading.Event()
    num_before = num_aborted(server)
    assert note is not None

    def held(*its: Any) -> None:
        note(*its)
        one = next(iter(server.engine.live.values())).first
        if one.num_computed_tokens > 0 if phase == "prefill" else len(one.token_ids) > 2:
            begun.set()
            assert may_go_on.wait(LIMIT_S)

    monkeypatch.setattr(server.engine, "on_step", held)
    with server.dial() as client:
        client.sendall(sent(asked(8000 if phase == "prefill" else 10, 100, stream=stream)) + HEALTH * behind)
        assert begun.wait(LIMIT_S)
        client.sendall(HEALTH * later)
        time.sleep(0.1 * later)
    wait_until(lambda: not server.front.num_open.total())
    monkeypatch.undo()
    may_go_on.set()
    wait_until(lambda: num_aborted(server) == num_before + 1)
    assert server.post(PATH, asked(10, 2))[0] == 200  # and others are served
    assert not caplog.records


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})])
def test_who_leaves_before_its_turn_is_forgotten(server: Server, path: str, body: dict[str, Any]) -> None:
    may_go_on = threading.Event()
    server.service.preparing.begin("", may_go_on.wait)
    with ExitStack() as stack:
        stack.callback(may_go_on.set)
        with server.dial() as client:
            client.sendall(sent(body, path))
            wait_until(lambda: server.front.num_open.total() == 1)
        wait_until(lambda: not server.front.num_open.total())
    assert server.post(path, body)[0] == 200


def test_requests_that_are_sent_at_once_are_answered_in_turn(server: Server) -> None:
    """Also more of them than are read ahead."""
    with server.dial() as client:
        for _ in range(20):
            client.sendall(sent(asked(5, 1)) + HEALTH)
        answer = received(client, lambda answer: answer.count(b'"ok"') == 20)
    assert answer.count(b"200 OK") == 40 and re.findall(rb'"usage"|"ok"', answer) == [b'"usage"', b'"ok"'] * 20


def ask_wide(client: socket.socket, server: Server, max_tokens: int, n: int) -> None:
    """Ask by a socket of little room for completions that say much of each token."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    wide = {"n": n, "logprobs": True, "top_logprobs": 20, "temperature": 1.0, "stream": True}
    client.sendall(sent(asked_in_chat(**asked(0, max_tokens, prompt=None, **wide)), CHAT))


def test_a_slow_reader_holds_up_itself_alone(server: Server) -> None:
    """What sockets do not hold waits for it, and it gets all in the end."""
    with socket.socket() as client:
        ask_wide(client, server, 300, 4)
        wait_until(lambda: server.engine.has_unfinished)
        assert server.post(PATH, asked(10, 3))[0] == 200
        wait_until(lambda: not server.engine.has_unfinished)
        with client.makefile("rb") as lines:
            events = [line for line in iter(lines.readline, b"data: [DONE]\n") if line.startswith(b"data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in events[4:]]  # the first have roles alone
    sizes, ends = [len(one["logprobs"]["content"]) for one in choices], [one["finish_reason"] for one in choices]
    assert ends.count("length") == 4 and sum(sizes) == 1200 and max(sizes) > 64


def test_who_takes_nothing_for_long_is_let_go(start: Start, bytes_model: Model, monkeypatch: Any) -> None:
    """As soon as the answer is larger than what sockets hold."""
    monkeypatch.setattr(web, "READER_S", 0.5)
    server = start(bytes_model.engine(num_blocks=512))
    with socket.socket() as client:
        ask_wide(client, server, 1500, 32)
        wait_until(lambda: 'finished_reason="' in server.get("/metrics")[1])
    assert num_aborted(server)
    wait_until(server.is_idle)
    assert_empty(server.engine)


def test_a_silent_connection_is_closed(start: Start, bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a first head, within one, and within a later one, also where its bytes trickle in. One that asks again
    stays, longer than it may take to send a head."""
    monkeypatch.setattr(web, "KEEP_ALIVE_S", 1)
    server = start(bytes_model.engine())
    for begun in (b"", HEALTH[:-2], HEALTH + HEALTH[:-2]):
        with server.dial() as client:
            client.sendall(begun)
            answer, end_s = b"", time.monotonic() + LIMIT_S
            client.settimeout(0.1)
            with suppress(ConnectionError):  # it was closed as more was on its way
                while True:
                    try:
                        if not (part := client.recv(4096)):
                            break
                        answer += part
                    except TimeoutError:
                        assert time.monotonic() < end_s
                        client.sendall(b"x" if begun else b"")
            assert answer.count(b"200 OK") == begun.count(b"\r\n\r\n")

    def is_answered(client: socket.socket) -> bool:
        with suppress(ConnectionError):
            client.sendall(HEALTH)
            return received(client, lambda answer: answer.endswith(b"}")).endswith(b"}")
        return False

    for _ in range(10):  # where the machine stops here, the first head comes too late
        with server.dial() as client:
            if is_answered(client):
                for _ in range(3):
                    time.sleep(0.4)
                    assert is_answered(client)
                return
    pytest.fail("no head was in time")


def test_what_is_too_wide_is_refused_soon(server: Server) -> None:
    """Many completions; many values; ids that are none, one among many too; a long name of a tenant."""
    assert server.post(PATH, asked(5, 1, n=513, temperature=1))[1]["error"]["param"] == "n"
    assert server.post(PATH, {"prompt": ["a"] * 257, "n": 2})[1]["error"]["param"] == "n"
    status, told, _ = server.post(PATH, b'{"prompt": "a", "x": [' + b"[]," * 300_000 + b"[]]}")
    assert (status, told["error"]["message"].partition(" values")[0]) == (400, "the body has more than 200000")
    for value in ([[1] * 2000, [2] * 3], [1.5] * 2000, {"a": [1] * 2000}):
        body = json.dumps({"prompt": value, "max_tokens": 1, "user": "x" * 600_000}).encode()
        small = server.post(PATH, {"prompt": value, "max_tokens": 1})[0]
        assert server.post(PATH, body)[0] == small == (200 if value == [[1] * 2000, [2] * 3] else 400)
    for name in ("priority", "stop_token_ids", "response_format", "best_of", "stream", "model"):
        body = json.dumps({"prompt": "x", "max_tokens": 1, name: [1] * 2000, "user": "x" * 600_000}).encode()
        assert server.post(PATH, body)[0] in (200, 400, 404)
    assert server.post("/tokenize", {"messages": 3})[0] == server.post("/tokenize", {"prompt": None})[0] == 400
    for wrong in (2**31, -5, 2**63):
        _, told, _ = server.post(PATH, {"prompt": [1] * 300_000 + [wrong], "max_tokens": 1})
        assert told["error"]["param"] == "prompt_token_ids"
    assert server.post(PATH, {"prompt": [1] * 300_000})[1]["error"]["code"] == "context_length_exceeded"
    assert server.post(PATH, b"[" * 600_000)[0] == 400
    assert server.post(PATH, asked(5, 1, tenant="t" * 10_000))[0] == 400
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    assert server.post(CHAT, {"messages": deep})[0] == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = (
    *("prompt", "messages", "model", "max_tokens", "temperature", "stream", "stream_options", "n", "stop", "logprobs"),
    *("logit_bias", "slo", "priority", "tools", "prompt_token_ids", "seed", "response_format", "explain", "best_of"),
)
NUM_MALFORMED = int(os.environ.get("MEDHA_MALFORMED_BODIES", 400))


@settings(max_examples=NUM_MALFORMED, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=50) | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), is_chat=st.booleans())
def test_malformed_bodies_are_refused_and_leave_nothing(server: Server, body: Any, is_chat: bool) -> None:
    status, told, _ = server.post(CHAT if is_chat else PATH, body)
    assert status in (200, 400, 404, 429)
    assert status == 200 or set(told["error"]) == {"message", "type", "param", "code"}


def test_an_error_does_not_repeat_what_was_sent(server: Server) -> None:
    secrets = ("SECRET; accepted: SECRET", ["SECRET" * 60], {"SECRET": ["SECRET"]}, [{"role": {"SECRET": 1}}])
    bodies: Any = {PATH: asked(5, 1), CHAT: asked_in_chat(), "/tokenize": {"prompt": "x"}, "/detokenize": {}}
    for path, body in bodies.items():
        for field in (*KNOWN_FIELDS, "tokens", "top_logprobs", "model", "stream"):
            for value in secrets:
                status, told, _ = server.post(path, body | {field: value})
                assert status == 200 or "SECRET" not in json.dumps(told)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (PATH, {"prompt": "x", "min_tokens": 20}, "min_tokens=20 exceeds max_tokens=16"),
        (PATH, {"prompt": 5}, "prompt of type int; accepted: a prompt or a list of prompts"),
        (CHAT, {"messages": []}, "messages is missing; accepted: a list of messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0] has no str role; accepted: an object with a str role"),
        ("/tokenize", {"messages": []}, "no prompt; accepted: one of prompt, prompt_token_ids, messages"),
    ],
)
def test_an_error_says_what_is_wrong(server: Server, path: str, body: Any, said: str) -> None:
    status, told, _ = server.post(path, body)
    assert (status, told["error"]["message"]) == (400, said)


def test_who_may_come_in(start: Start, bytes_model: Model) -> None:
    key = Key("alice", "right", least_ttft_s=1.0, tpot_s=0.5, max_prompt_tokens=20, max_concurrent=1)
    server, right = start(bytes_model.engine(), key, hosts=("127.0.0.1",), max_body_bytes=2000), RIGHT
    assert server.post(PATH, asked(5, 1))[0] == 401
    assert server.post(PATH, asked(5, 1), authorization="Bearer wrong")[0] == 401
    assert server.post(PATH, asked(5, 1), **right)[0] == 200
    for path in ("/v1/models", "/metrics", "/events", "/version"):
        assert server.get(path)[0] == 401
    assert [server.get(path)[0] for path in ("/health", "/ready", "/")] == [200, 200, 200]
    assert server.post(PATH, asked(21, 1), **right)[0] == 400
    assert server.post(PATH, asked(5, 1, slo={"ttft_s": 0.5}), **right)[1]["error"]["param"] == "slo.ttft_s"
    assert server.post(PATH, asked(5, 1), x_slo_ttft_ms="500", **right)[0] == 400
    assert server.post(PATH, asked(5, 1), x_slo_ttft_ms="1500", **right)[0] == 200
    assert server.post(PATH, asked(5, 1), x_slo_ttft_ms="soon", **right)[0] == 400
    stream = asked(5, 1, stream=True, stream_options={"include_usage": "yes"})
    assert server.post(PATH, stream, **right)[1]["error"]["param"] == "stream_options.include_usage"
    stream["stream_options"] = {"include_usage": None, "of_another_engine": [1]}
    assert server.post(PATH, stream, **right)[0] == 200
    assert server.post(PATH, asked(5, 1, priority="high"), **right)[1]["error"]["param"] == "priority"
    assert server.post(PATH, asked(5, 1, priority="low"), **right)[0] == 200
    assert server.post(PATH, b" " * 3000, **right)[0] == 413
    assert server.post(PATH, asked(5, 1), host="evil.example", **right)[0] == 400
    assert server.ask("POST", PATH, b"{}", right | {"content-type": "text/plain"})[0] == 415
    zipped = right | {"content-type": "application/json", "content-encoding": "gzip"}
    assert server.ask("POST", PATH, b"{}", zipped)[0] == 415
    assert server.get("/nowhere")[0] == 404 and server.get(PATH)[0] == 405
    assert server.get("/version/", host="evil.example")[0] == 404  # nobody is sent where that header says
    for head, status in ((b"", 200), (b"host: evil.example\r\n", 400), (b"host: 127.0.0.1\r\n" * 2, 400)):
        with server.dial() as client:  # as a load balancer looks whether it is there
            client.sendall(b"GET /health HTTP/1.0\r\n" + head + b"\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("limited", ["key", "server"])
def test_so_many_requests_are_open_and_no_more(start: Start, bytes_model: Model, limited: str) -> None:
    of_key, of_server = (1, 99) if limited == "key" else (None, 1)
    key = Key("alice", "right", max_concurrent=of_key)
    server = start(bytes_model.engine(num_blocks=512), key, max_concurrent=of_server)
    events = server.events(PATH, asked(10, 4000, stream=True), **RIGHT)
    next(events)
    status, told, headers = server.post(PATH, asked(5, 1), **RIGHT)
    assert (status, told["error"]["type"], headers["retry-after"]) == (429, "RateLimitError", "1")
    events.close()
    wait_until(lambda: server.post(PATH, asked(5, 1), **RIGHT)[0] == 200)


def test_a_step_that_fails_ends_the_streams_with_an_error(
    start: Start, bytes_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(bytes_model.engine())
    fail_in_run(server.engine, monkeypatch, at=5, error=RuntimeError("broken"))
    events = list(server.events(PATH, asked(10, 1000, stream=True)))
    assert events[-2]["error"]["code"] == "engine_dead" and events[-1] == "data: [DONE]"
    assert server.get("/health")[0] == server.get("/ready")[0] == 503
    assert server.post(PATH, asked(10, 1))[0] == 503


def test_a_request_that_fails_is_a_line_of_the_log(server: Server, monkeypatch: Any, caplog: Any) -> None:
    """Of a stream too; the traceback is there once."""
    failed = NonFiniteLogitsError("no number")
    monkeypatch.setattr(app, "_traced", set())
    monkeypatch.setattr(Completion, "take", lambda self, _, now_s: self.finish("error", now_s, error=failed) or True)
    for stream in (True, False, True):
        assert "NonFiniteLogitsError" in json.dumps(server.post(PATH, asked(5, 1, stream=stream))[1])
    assert [record.getMessage() for record in caplog.records] == [f"{PATH} failed: no number"] * 3
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False]


def test_a_huge_body_holds_up_nobody(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a child has it, tokens come, the loop answers, and a large one is read, its ids as an array."""
    plain = server.post(PATH, asked(7000, 2))[1]["choices"]
    has_begun, may_end, ask = threading.Event(), threading.Event(), Child.ask

    def slow(child: Child, message: Any) -> bytes:
        if len(message) > 8_000_000:
            has_begun.set()
            assert may_end.wait(LIMIT_S)
        return ask(child, message)

    monkeypatch.setattr(Child, "ask", slow)
    huge, large = (json.dumps(asked(7000, 2)).encode() + b" " * size for size in (9_000_000, 600_000))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, PATH, huge)
        assert has_begun.wait(LIMIT_S)
        assert server.post(PATH, asked(10, 20))[1]["usage"]["completion_tokens"] == 20
        assert server.post(PATH, large)[1]["choices"] == plain
        assert server.get("/health")[0] == 200 and not answer.done()
        may_end.set()
        assert answer.result(LIMIT_S)[1]["choices"] == plain


def test_who_cannot_be_in_time_is_told_at_once(start: Start, bytes_model: Model) -> None:
    """And not to come back, where no wait helps; OpenAI's clients obey that."""
    config = EngineConfig.from_flat(str(bytes_model.folder), num_kv_blocks=64, num_threads=1, admission="refuse")
    server = start(build_engine(config))
    for stream in (False, True):
        status, told, headers = server.post(PATH, asked(50, 4, slo={"ttft_s": 1e-9}, stream=stream))
        assert (status, told["error"]["param"], headers["x-should-retry"]) == (429, "slo.ttft_s", "false")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=5)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="model", prompt="hello", extra_body={"slo": {"tpot_s": 1e-9}})
    assert server.post(PATH, asked(50, 4, slo={"ttft_s": 100}))[0] == 200


def test_a_request_keeps_its_name(start: Start, bytes_model: Model) -> None:
    """Twice at once, too, and where there is no such route or it may not come in; what is no name is left out."""
    server = start(bytes_model.engine(num_blocks=512), Key("alice", "right"))
    events = server.events(PATH, asked(10, 4000, stream=True), **RIGHT)
    next(events)
    for _ in range(2):
        _, told, headers = server.post(PATH, asked(5, 1), x_request_id="mine", **RIGHT)
        assert (headers["x-request-id"], told["id"]) == ("mine", "cmpl-mine")
    assert server.post(PATH, asked(5, 1, request_id="yours"), **RIGHT)[1]["id"] == "cmpl-yours"  # as vLLM has it
    _, told, headers = server.post(PATH, asked(5, 1), x_request_id="a b" * 100, **RIGHT)
    assert "x-request-id" not in headers and "a b" not in told["id"]
    events.close()
    for path, status in (("/nowhere", 404), (PATH, 405), ("/version", 401)):
        found, told, headers = server.get(path, x_request_id="mine")
        assert (found, headers["x-request-id"], told["error"]["code"]) == (status, "mine", status)
    assert server.get(PATH)[2]["allow"] == "POST" and server.get("/version")[2]["www-authenticate"] == "Bearer"


_POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_JSON = _POST + b"content-type: application/json\r\n"
_CHUNKED = _JSON + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),  # a TLS client
        (_POST + b"content-length: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no host
        (_JSON + b"\r\n", 400),  # no body
        (b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),  # a client of HTTP/2
        (_CHUNKED[:-2] + b"content-length: 5\r\n\r\n", 400),
        (_CHUNKED.replace(b"chunked", b"gzip"), 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-a: y\r\n" * 4000, 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused(server: Server, raw: bytes, status: int) -> None:
    with server.dial() as client:
        client.sendall(raw)
        head, _, body = received(client, lambda answer: answer.endswith(b"}}")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status) and json.loads(body)["error"]["code"] == status
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("begun", [b"2;", b"2\r\n{}\r\n0\r\n"])
def test_what_has_no_end_is_cut(server: Server, begun: bytes) -> None:
    """The line before a part of a body, and lines behind the last one."""
    with server.dial() as client, suppress(ConnectionError):
        client.sendall(_CHUNKED + begun)
        for _ in range(10_000):
            client.sendall(b"x-a: y\r\n" * 1000 if b"{}" in begun else b"y" * 8000)
        pytest.fail("80 MB were taken")
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_who_would_use_another_protocol_is_answered_by_this_one(server: Server, protocol: str) -> None:
    """Java's HTTP client offers to upgrade with every request; its body comes in the same packet, or later."""
    given = {"connection": "Upgrade, HTTP2-Settings", "upgrade": protocol, "http2-settings": "AAA"}
    raw = sent(asked(5, 1), **given)
    for size in (len(raw), len(raw) - 10):
        with server.dial() as client:
            for part in (raw[:size], raw[size:], sent(asked(5, 1))):
                client.sendall(part)
                time.sleep(0.1)
            answer = received(client, lambda answer: answer.count(b'"usage"') == 2)
            assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'"usage"') == 2


def test_one_connection_too_many_is_told_so(start: Start, bytes_model: Model) -> None:
    """In OpenAI's shape, and to come again; when others have gone there is room."""
    server = start(bytes_model.engine(), max_connections=2)
    with ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(server.dial())
            client.sendall(HEALTH)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        status, told, headers = server.post(PATH, asked(5, 1))
        assert (status, told["error"]["type"]) == (503, "ServiceUnavailableError")
        assert (headers["content-type"], headers["retry-after"]) == ("application/json", "1")
    wait_until(lambda: server.post(PATH, asked(5, 1))[0] == 200)


def test_short_prompts_wait_for_no_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones, several at once, and chats, whose template may take its time, do."""
    in_thread = Mock(wraps=server.service.in_thread)
    monkeypatch.setattr(server.service, "in_thread", in_thread)
    for body in (asked(5, 1), asked(5, 1, prompt="hello"), asked(2000, 1)):
        assert server.post(PATH, body)[0] == 200
    in_thread.assert_not_called()
    for body in (asked(2001, 1), asked(5, 1, prompt=["a", "b"])):
        assert server.post(PATH, body)[0] == 200
    assert server.post(CHAT, asked_in_chat())[0] == 200
    assert in_thread.call_count == 4


def test_bodies_in_pieces_all_together_and_half_a_one(start: Start, bytes_model: Model, monkeypatch: Any) -> None:
    """One without a length is not read beyond the limit; so many may be read at once; one that does not come ends."""
    server = start(bytes_model.engine(), max_body_bytes=2000)
    for size, status in ((10, 200), (1500, 413)):
        body = json.dumps(asked(size, 1)).encode()
        parts = [body[at : at + 50] for at in range(0, len(body), 50)]
        with closing(server.connect()) as connection:
            with suppress(ConnectionError):  # one that is too large is answered before it is there
                connection.request("POST", PATH, iter(parts), {"content-type": "application/json"}, encode_chunked=True)
            assert connection.getresponse().status == status
    monkeypatch.setattr(app, "_BODIES", 0.5)  # as one is read at a time here
    for padding, status in ((1200, 503), (0, 200)):
        assert server.post(PATH, json.dumps(asked(5, 1)).encode() + b" " * padding)[0] == status
    monkeypatch.setattr(app, "_BODY_S", 0.2)
    with server.dial() as client:
        client.sendall(sent(asked(5, 1))[:-1])
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_fields_that_nobody_knows_are_counted_and_named_once(start: Start, bytes_model: Model, caplog: Any) -> None:
    """What is known is not among them; names are cut, and there are only so many of them in the log."""
    server = start(bytes_model.engine())
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        empty: Any = {"slo": None, "stream": False, "stream_options": {}, "explain": False, "x": None, "y": [], "z": {}}
        assert server.post(PATH, asked(5, 1, usr="SECRET", **empty))[0] == 200
    for empty in ({"slo": [], "stop": {}, "seed": [], "model": {}}, {"slo": {}, "prompt_token_ids": [], "stream": []}):
        assert server.post(PATH, asked(5, 1) | empty)[0] == 200
    chat = asked_in_chat(logprobs=True, top_logprobs=1, prompt=None, arrival_s=5)  # as of a request line
    assert server.post(CHAT, chat)[0] == 200  # of what is empty nothing is said
    assert server.post("/detokenize", {"tokens": [], "foo": 1, "x": None})[1] == {"prompt": ""}
    assert server.post(PATH, asked(5, 1, top_logprobs=1))[0] == 200  # as of a chat
    assert re.search(r"medha:request_fields_ignored_total\{.*\} 5.0", server.get("/metrics")[1])
    for name in ("usr", "arrival_s", "foo", "top_logprobs"):
        assert caplog.text.count(f"'{name}' is ignored") == 1
    assert caplog.text.count("is ignored") == 4
    for long in ({"x" * 10_000: 1}, {f"{n}-{'z' * 500}": n for n in range(500)}):
        assert server.post(PATH, asked(5, 1) | long)[0] == 200
    assert caplog.text.count("is ignored") == 100 and "z" * 90 not in caplog.text and "SECRET" not in caplog.text
    assert max(map(len, server.front._ignored)) <= 80


def test_why_a_template_failed_is_logged_once(start: Start, bytes_model: Model, caplog: Any) -> None:
    """And that the messages did not please it is not."""
    template = "{{ raise_exception('no') if messages[0].content == 'a' else messages[0].role.rsplit() }}"
    tokenizer = Tokenizer(bytes_model.tokenizer.backend, chat_template=template)
    server = start(replace(bytes_model, tokenizer=tokenizer).engine())
    reasons = {"a": "the model has no chat template that takes these messages", "b": "the model's chat template failed"}
    for content in "abb":
        status, told, _ = server.post(CHAT, asked_in_chat(content))
        assert (status, told["error"]["message"]) == (400, reasons[content])
    assert caplog.text.count("string has no method named rsplit") == 1 and "raise_exception" not in caplog.text


def test_a_head_alone_and_what_methods_there_are(server: Server) -> None:
    for path in ("/health", "/v1/models", "/events", "/"):
        with closing(server.connect()) as connection:
            connection.request("HEAD", path)
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read() == b""
    status, told, headers = server.ask("OPTIONS", PATH, None, {})
    assert (status, headers["allow"], told["error"]["code"]) == (405, "POST", 405)
    assert server.get("/v1/models")[1]["data"][0]["created"] > 1.7e9


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_still_prepared_at_the_end_is_told_so(
    start: Start, bytes_model: Model, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also where the preparation fails, as the tokenizer is closed."""
    prepare, begun, may_go_on = service.prepare_arrival, threading.Event(), threading.Event()

    def held(*its: Any) -> Any:
        begun.set()
        may_go_on.wait(LIMIT_S)
        if fails:
            raise ValidationError("the process ended")
        return prepare(*its)

    monkeypatch.setattr(service, "prepare_arrival", held)
    with ThreadPoolExecutor(1) as pool, served(bytes_model.engine()) as server:
        answer = pool.submit(server.post, CHAT, asked_in_chat())
        begun.wait()
        server.service.cut()
        threading.Timer(0.0 if fails else 4.0, may_go_on.set).start()
    status, told, _ = answer.result()
    assert status == 503 and told["error"]["code"] == "server_stopped"


def test_a_whole_answer_is_open_until_it_is_taken(server: Server) -> None:
    """So that limits count it, and a signal leaves it time."""
    many = asked(0, 30, prompt=[random_ids(10, seed=at) for at in range(40)], logprobs=20)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(sent(many))
        head = received(client, lambda got: b"\r\n\r\n" in got)
        assert server.front.num_open.total() == 1
        size = int(head.partition(b"content-length: ")[2].split(b"\r")[0])
        received(client, lambda got: len(got) >= size - len(head.partition(b"\r\n\r\n")[2]))
        wait_until(server.is_idle)


def test_a_body_and_texts_for_which_there_is_no_process(
    start: Start, bytes_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(bytes_model.tokenizer.backend, chat_template="{{ messages[0].content }}")
    server = start(replace(bytes_model, tokenizer=tokenizer).engine())
    large = json.dumps(asked(10, 1)).encode() + b" " * 600_000
    asks: Any = [(PATH, large), (CHAT, asked_in_chat()), ("/tokenize", {"prompt": "x" * 200_000})]
    monkeypatch.setattr(process, "popen_module", Mock(side_effect=BlockingIOError(11, "Resource unavailable")))
    for status, told, _ in (server.post(*ask) for ask in asks):
        assert (status, told["error"]["type"]) == (503, "ServiceUnavailableError")
    monkeypatch.undo()
    assert [server.post(*ask)[0] for ask in asks] == [200] * 3


def test_ids_of_a_long_text_are_written_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Mock(wraps=app.msgspec.json.encode)
    monkeypatch.setattr(app.msgspec.json, "encode", encode)
    answer = server.post("/tokenize", {"prompt": "x" * 300_000})[1]
    sizes = [len(call.args[0]) for call in encode.call_args_list if isinstance(call.args[0], list)]
    assert answer["count"] == len(answer["tokens"]) == 300_000 == sum(sizes) and max(sizes) < 100_000
