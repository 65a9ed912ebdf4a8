"""Request files in, output files out."""

import io
import json
import math
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medha.cli.files import opened
from medha.engine.admission import tokenise
from medha.engine.arrivals import Arrival
from medha.engine.jsonl import output_line, read_requests, unwritable_reported, write_line
from medha.errors import ConfigError, RequestError, UnsupportedFeatureError, ValidationError
from medha.outputs import CompletionOutput, Explanation, Logprob, RequestMetrics, RequestOutput
from medha.params import SLO, SamplingParams
from medha.serve.protocol import explained
from tests.commands import write_lines
from tests.text.samples import chat_tokenizer


def make_output(text: str | None = "hi", *, logprobs: Any = None, error: Exception | None = None) -> RequestOutput:
    metrics = RequestMetrics(1.0, 1.5, 2.0, 4.0, num_prompt_tokens=3, num_output_tokens=2)
    completion = CompletionOutput(0, text, [5, 6], "stop", "END", logprobs=logprobs)
    return RequestOutput("r", "abc", [1, 2, 3], [completion], True, metrics, error)


def read(tmp_path: Path, *lines: str | bytes | dict[str, Any], **defaults: Any) -> list[Arrival]:
    return read_requests(write_lines(tmp_path / "r.jsonl", *lines), defaults)


def test_a_line_with_every_field(tmp_path: Path) -> None:
    slo = {"ttft_s": 2.0, "tpot_s": 0.1}
    sampling = {"max_tokens": 7, "temperature": 0.5, "stop": ["x"], "seed": None}
    line = {"id": "a", "prompt": "hello", **sampling, "arrival_s": 1.5, "slo": slo, "priority": "high"}
    params = SamplingParams(max_tokens=7, temperature=0.5, stop=["x"], top_k=3, seed=0)
    assert read(tmp_path, line, top_k=3, max_tokens=1) == [
        Arrival("a", {"prompt": "hello"}, params, SLO(2.0, 0.1), 1.5, "high")
    ]


def test_forms_of_prompts_and_ids(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    options = {"tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False}}
    arrivals = read(
        tmp_path,
        b"\xef\xbb\xbf" + b'{"prompt": "with a byte order mark", "messages": null}\r',
        "",
        "   ",
        {"prompt_token_ids": [1, 2], "request_id": "other name"},
        {"messages": messages, "id": 12, "n": 2, **options},
    )
    assert [(arrival.request_id, arrival.prompt) for arrival in arrivals] == [
        ("line-1", {"prompt": "with a byte order mark"}),
        ("other name", {"prompt_token_ids": [1, 2]}),
        ("12", {"messages": messages, **options}),
    ]
    assert [arrival.params and arrival.params.n for arrival in arrivals] == [1, 1, 2]


def test_arrivals_are_sorted_by_time_and_then_stand_as_in_the_file(tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": "x", "arrival_s": at} for name, at in zip("abcd", [2, 0, 1, 0], strict=True)]
    assert [a.request_id for a in read(tmp_path, *rows)] == ["b", "d", "c", "a"]


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("{", ValidationError, "a request: not JSON"),
        (b'{"prompt": "\xff"}', ValidationError, "a request: "),
        ('"prompt"', ValidationError, "a request: holds a str, 'prompt'; accepted: a JSON object"),
        ({"prompt": "x", "id": ""}, ValidationError, "id=''; accepted: a string or an integer"),
        ({"prompt": "x", "n": 2, "temperature": 0}, ValidationError, "n=2; accepted: 1 with temperature=0"),
        ({"prompt": "x", "tool_choice": "required"}, UnsupportedFeatureError, "tool_choice is not implemented"),
        ('{"prompt": "x", "temperature": NaN}', ValidationError, "temperature=nan; accepted"),
        ({"prompt": "x", "arrival_s": -1}, ValidationError, "arrival_s=-1; accepted: seconds"),
        ('{"prompt": "x", "arrival_s": 1e999}', ValidationError, "arrival_s=inf; accepted: seconds"),
        ('{"prompt": "x", "arrival_s": 1' + "0" * 400 + "}", ValidationError, "arrival_s=1000"),
        ({"prompt": "x", "slo": {"ttft": 3}}, ValidationError, "slo={'ttft': 3}; accepted: an object"),
        ({"prompt": "x", "slo": {"ttft_s": 0}}, ValidationError, r"slo.ttft_s=0; accepted"),
        ({"arrival_s": 5}, ValidationError, "no prompt; accepted: one of prompt"),
        ({"arrival_s": 5, "prompt": 7}, ValidationError, "prompt of type int; accepted"),
    ],
)
def test_a_wrong_line_is_an_arrival_with_an_error(
    tmp_path: Path,
    line: str | bytes | dict[str, Any],
    kind: type[Exception],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is known before it arrives."""
    wrong, right = read(tmp_path, line, {"prompt": "fine", "arrival_s": 1})
    assert (type(wrong.error), wrong.arrival_s) == (kind, 0.0)
    assert str(wrong.error).startswith(message)
    assert len(str(wrong.error)) < 300
    assert right.error is None
    assert f"1 of 2 requests in {tmp_path / 'r.jsonl'} cannot be run; the first is line 1: " in caplog.text


def test_an_id_is_taken_once(tmp_path: Path) -> None:
    """And a line without one has one that no line before it has."""
    ids = ["a", 1, "a", "1", "line-6", None, "line-6", None]
    arrivals = read(tmp_path, *({"id": one, "prompt": "x"} for one in ids))
    assert [(a.request_id, a.error and str(a.error)) for a in arrivals] == [
        *(("a", None), ("1", None)),
        *(("line-3", "id 'a' is in the file already"), ("line-4", "id '1' is in the file already")),
        *(("line-6", None), ("line-6-", None), ("line-7", "id 'line-6' is in the file already"), ("line-8", None)),
    ]


def test_unknown_fields_are_ignored_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arrivals = read(tmp_path, {"prompt": "x", "user": "me"}, {"prompt": "x", "user": 1, "modle": ""})
    assert [a.error for a in arrivals] == [None, None]
    assert caplog.messages == ["request fields ignored (with how many lines): {'user': 2, 'modle': 1}"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^request file .*gone\.jsonl: No such file or directory$"):
        read_requests(tmp_path / "gone.jsonl", {})
    with pytest.raises(ConfigError, match="Is a directory"):
        read_requests(tmp_path, {})
    assert read(tmp_path, "") == []
    with pytest.raises(ConfigError, match=r"2 of 2 requests in .*r\.jsonl cannot be run; line 1: no prompt; accepted"):
        read(tmp_path, {"max_tokens": 5}, "{")


def test_output_line() -> None:
    output = make_output()
    assert json.dumps(output_line(output)) == (
        '{"id": "r", "text": "hi", "token_ids": [5, 6], "finish_reason": "stop", "stop_reason": "END", '
        '"num_prompt_tokens": 3, "num_output_tokens": 2, "queue_s": 0.5, "ttft_s": 1.0, "ttft_parts_s": null, '
        '"held_up_by": null, "tpot_s": 2.0, "e2e_s": 3.0, "met_slo": null, "is_relegated": false, "error": null}'
    )
    assert list(output_line(output, custom_id="c"))[:2] == ["id", "custom_id"]
    failed = output_line(make_output(error=ValidationError("no")))
    assert failed["error"] == {"type": "ValidationError", "message": "no"}
    output.metrics.ttft_slo_s = 1.5
    assert output_line(output)["met_slo"] is True
    output.metrics.is_relegated = True
    assert [output_line(output)[name] for name in ("met_slo", "is_relegated")] == [False, True]
    others = (("a", 0.375), ("b", 0.125))
    output.metrics.explanation = Explanation("r", True, 1.0, 0.25, 0.125, 0.5, others, 0.0, 0.0625, 0.0625, ())
    line = json.loads(json.dumps(output_line(output)))
    parts = {"own": 0.25, "decodes": 0.125, "others": 0.5, "memory": 0.0, "pipeline": 0.0625, "idle": 0.0625}
    assert line["ttft_parts_s"] == parts
    assert line["held_up_by"] == [["a", 0.375], ["b", 0.125]]
    assert "decode_wait_s" not in line
    output.metrics.explanation = replace(output.metrics.explanation, decode_wait_s=0.75)
    assert output_line(output)["decode_wait_s"] == 0.75
    assert explained(output)["explanation"]["decode_wait_s"] == 0.75


def test_a_line_of_several_completions() -> None:
    completions = [CompletionOutput(i, text=f"t{i}", token_ids=[i] * (i + 1), finish_reason="length") for i in range(2)]
    metrics = RequestMetrics(1.0, 1.5, 2.0, 4.0, num_output_tokens=3, num_completions=2)
    line = output_line(RequestOutput("a", "x", [1], completions, True, metrics))
    assert (line["text"], line["token_ids"], line["num_output_tokens"]) == ("t0", [0], 3)
    assert line["outputs"] == [
        {"index": 0, "text": "t0", "token_ids": [0], "finish_reason": "length", "stop_reason": None},
        {"index": 1, "text": "t1", "token_ids": [1, 1], "finish_reason": "length", "stop_reason": None},
    ]
    assert line["tpot_s"] == 4.0  # 2 s for half a token more than the first, on average
    assert "outputs" not in output_line(RequestOutput("a", "x", [1], completions[:1], True, metrics))


def test_lines_are_json_whatever_the_text_and_the_stream() -> None:
    logprobs = [{5: Logprob(-math.inf, 1), 6: Logprob(-0.5, 2)}]
    for encoding in ("utf-8", "ascii", "latin-1"):
        raw = io.BytesIO()
        file = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
        write_line(file, make_output("\u00fc \U0001f600 \ud800 \x00 \u2028 \n", logprobs=logprobs))
        write_line(file, make_output(None))
        first, second, rest = raw.getvalue().split(b"\n")
        assert rest == b""
        assert json.loads(first, parse_constant=pytest.fail)["text"] == "\u00fc \U0001f600 \ud800 \x00 \u2028 \n"
        assert json.loads(first)["logprobs"] == [{"5": None, "6": -0.5}]
        assert json.loads(second)["text"] is None
    plain = io.StringIO()
    write_line(plain, make_output("ü"))
    assert json.loads(plain.getvalue())["text"] == "ü"


def test_openai_batch_lines(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = {"method": "POST", "url": "/v1/chat/completions"}
    more = {"messages": messages, "logprobs": True, "top_logprobs": 3, "stream": False}
    chats = read(
        tmp_path,
        {"custom_id": "a", **chat, "body": {"model": "m", "messages": messages, "max_completion_tokens": 5}},
        {"custom_id": "b", **chat, "body": more},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": [1, 2], "logprobs": 2}, "arrival_s": 1},
        {"custom_id": "d", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "e", **chat, "body": "x"},
        {"custom_id": "f", **chat, "body": {"model": "m"}},
        {"id": "g", "prompt": "x"},
        max_tokens=9,
    )
    by_id = {arrival.request_id: arrival for arrival in chats}
    assert [by_id[i].prompt for i in "abc"] == [{"messages": messages}] * 2 + [{"prompt_token_ids": [1, 2]}]
    params = [by_id[i].params for i in "abc"]
    assert [(p.max_tokens, p.logprobs) for p in params if p is not None] == [(5, None), (9, 3), (9, 2)]
    assert by_id["c"].arrival_s == 1.0
    assert [str(by_id[i].error).partition(";")[0] for i in "def"] == ["url='/v1/embeddings'", "body='x'", "no prompt"]
    assert [by_id[i].custom_id for i in "abcdefg"] == [*"abcdef", None]


def test_seeds_go_by_the_place_in_the_file(tmp_path: Path) -> None:
    """Whatever else is run, or in which order; the completions of a line draw with seeds of its own. -1 is none."""
    rows = [{"prompt": "x", "arrival_s": 1}, "{", *({"prompt": "x"} | seed for seed in ({"seed": 5}, {"seed": -1}, {}))]
    path = write_lines(tmp_path / "r", *rows)
    found = {a.request_id: a.params.seed for a in read_requests(path, {}, seed=2) if a.params}
    of_its_place = {f"line-{at}": (2_000_005 + at) * 16384 for at in (1, 4, 5)}
    assert found == of_its_place | {"line-3": 5}
    large = read_requests(path, {}, seed=2**63 - 1)
    assert all(arrival.error is None for arrival in large if arrival.request_id != "line-2")


def test_a_file_at_its_limit_ends_with_a_whole_line(tmp_path: Path) -> None:
    path, line = tmp_path / "out.jsonl", "a line of thirty characters..\n"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # bytes of any file
    try:
        with pytest.raises(RequestError) as caught, opened(path) as file, unwritable_reported(path):
            file.writelines([line] * 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == f"output file {path}: File too large; what was written before is kept"
    assert path.read_text() == line * 3


def test_a_line_says_whether_its_text_gets_special_tokens(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(None, adds_bos=True)
    lines = [{"prompt": "hello", **more} for more in ({}, {"add_special_tokens": None}, {"add_special_tokens": False})]
    ids = [tokenise(arrival.prompt, tokenizer, 1000)[1].tolist() for arrival in read(tmp_path, *lines)]
    assert ids[0] == ids[1] == tokenizer.encode("hello") and ids[2] == ids[0][1:]
    with pytest.raises(ValidationError, match="add_special_tokens=1; accepted: true or false"):
        tokenise({"prompt": "hello", "add_special_tokens": 1}, tokenizer, 1000)
