"""What ``medha generate`` is asked to serve: the requests that its parameters hold or name, checked before it loads.

What is wrong with the parameters, or with all requests, ends the command; what is wrong with some of them is their own.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from medha.cli.command import check_apart
from medha.cli.options import SAMPLING
from medha.cli.replacing import replacing
from medha.config import EngineConfig
from medha.engine.arrivals import Arrival
from medha.engine.jsonl import STDIN, read_input, read_requests
from medha.errors import ConfigError, ValidationError
from medha.parallel.launch import is_launched
from medha.params import FILTERS, PROMPT_FORMS, SamplingParams, prompt_form

if TYPE_CHECKING:
    from medha.text import Tokenizer

logger = logging.getLogger("medha")


def requested(given: Mapping[str, Any], config: EngineConfig) -> tuple[list[Arrival], Earlier]:
    """The requests that are left to run, and what an earlier run has done.

    With ``--resume`` the lines of its output that are to be written again are dropped there; nothing else is written.

    Args:
        given: parameters of the command by name.
        config: of the engine that is to serve them.

    Raises:
        ConfigError, ValidationError: a parameter or file is wrong, or no request can be run; the subclass says what.
    """
    output = given["output"]
    _check_files(given)
    arrivals = _arrivals(given)
    if not given["resume"]:
        checked = _checked(config, arrivals)
        if checked and all(arrival.error for arrival in checked):
            many = f"none of {len(checked)} requests can be run; the first: " if len(checked) > 1 else ""
            raise ConfigError(f"{many}{checked[0].error}")
        return checked, Earlier()
    earlier = read_earlier(output, arrivals)
    left = earlier.left(arrivals)
    logger.info("%d of %d requests are in %s; %d to run", len(earlier.done), len(arrivals), output, len(left))
    drop_lines(output, earlier.dropped)
    return _checked(config, left), earlier


def _check_files(given: Mapping[str, Any]) -> None:
    """Refuse files and options that do not go together."""
    output, requests = given["output"], given["requests"]
    written = [output, given["timeline"], given["journal"]]
    check_apart(written, [given["prompt_file"], requests])
    if "-" in map(str, written):
        raise ConfigError("output file -; accepted: another name, or for lines on stdout --json")
    for name in ("overwrite", "resume"):
        if given[name] and output is None:
            raise ConfigError(f"--{name} without --output; accepted: with the file that it is about")
    if given["overwrite"] and given["resume"]:
        raise ConfigError("--overwrite and --resume given; accepted: one of them")
    if given["resume"] and requests is None:
        raise ConfigError("--resume without --requests; accepted: the same request file as before")
    is_free = output is None or not os.path.isfile(output) or not output.stat().st_size
    if not (is_free or given["overwrite"] or given["resume"]):
        accepted = "another file, --resume (go on with it), --overwrite"
        raise ConfigError(f"output file {output} is not empty; accepted: {accepted}")


def _checked(config: EngineConfig, arrivals: list[Arrival]) -> list[Arrival]:
    """The requests, each with its error where its text cannot be served by this model, whatever its weights.

    Raises:
        ConfigError: the model's folder is wrong.
    """
    from medha.models.folder import resolve_model
    from medha.models.hf_config import model_config_of
    from medha.text import load_tokenizer  # here because it loads tokenizers

    if not arrivals or (is_launched() and not Path(config.model).is_dir()):
        return arrivals  # a model from the hub: the other ranks wait for this one, and do not while it downloads
    folder = resolve_model(config.model, revision=config.revision, with_weights=config.load_format != "dummy")
    model_config_of(config, folder)  # a model that cannot be served is said before what it lacks
    text_folder = folder if config.tokenizer is None else resolve_model(config.tokenizer, with_weights=False)
    tokenizer = load_tokenizer(text_folder)
    if tokenizer is None:
        logger.warning("%s has no tokenizer.json: prompts and answers are token ids", config.tokenizer or config.model)
    errors = [None if arrival.error else _text_error(arrival, tokenizer) for arrival in arrivals]
    found = [error for error in errors if error is not None]
    if 0 < len(found) < len(arrivals):
        logger.warning("%d of %d requests cannot be run; the first: %s", len(found), len(arrivals), found[0])
    return [replace(one, error=one.error or error) for one, error in zip(arrivals, errors, strict=True)]


def _text_error(arrival: Arrival, tokenizer: Tokenizer | None) -> ValidationError | None:
    """Why the text of a request cannot be served, if it cannot."""
    name, value, _ = prompt_form(arrival.prompt)
    if name == "prompt_token_ids":
        return None
    if tokenizer is None:
        return ValidationError(f"{name} needs a tokenizer, and the model has none; accepted: prompt_token_ids")
    if name == "messages" and tokenizer.chat_template is None:
        return ValidationError("messages need a chat template, and the model has none; accepted: prompt")
    if value == "" and not tokenizer.encode(""):
        return ValidationError("the prompt is empty; accepted: at least one token")
    return None


def _arrivals(given: Mapping[str, Any]) -> list[Arrival]:
    """The requests that the parameters of the command hold or name."""
    sampling = {name: given[name] for name in SAMPLING if given[name] is not None} | {"output_kind": "delta"}
    params = SamplingParams.from_dict(sampling)
    texts, file, requests = list(given["prompt"] or []), given["prompt_file"], given["requests"]
    if not texts and file is None and requests is None and _is_pipe(sys.stdin):
        logger.info("the prompt comes from standard input")
        file = STDIN
    if (bool(texts) or file is not None) == (requests is not None):
        both = "neither" if requests is None else "both"
        accepted = "--prompt, --prompt-file, a pipe, or --requests"
        raise ConfigError(f"{both} of prompts and --requests given; accepted: {accepted}")
    if not given["temperature"] and (names := [name for name in FILTERS if given[name] is not None]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        logger.warning("at temperature 0, the default, this changes nothing: %s; see --temperature", flags)
    if requests is not None:
        if given["chat"]:
            raise ConfigError("--chat is for --prompt and --prompt-file; accepted in a request file: messages")
        try:
            return read_requests(requests, sampling, seed=given["seed"])
        except ConfigError as error:
            raise _of_a_trace(requests) or error from None
    if file is not None:
        try:
            texts.append(read_input(file, "prompt file").decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompt file {file}: not UTF-8 at byte {error.start}") from error
    prompts = [{"messages": [{"role": "user", "content": text}]} if given["chat"] else text for text in texts]
    return [Arrival(f"prompt-{i}", prompt, params) for i, prompt in enumerate(prompts)]


def _of_a_trace(path: Path) -> ConfigError | None:
    """What to tell of a file that holds lengths and no prompts; None of any other."""
    from medha.workload.formats import recognised  # here because it loads numpy, which help need not wait for

    if path == STDIN or not os.path.isfile(path):  # Path's own raises where a name is too long
        return None
    with path.open("rb") as file:
        head = next((line for line in file if line.strip()), b"").decode(errors="replace")
    kind = recognised(head)
    if kind is None or any(f'"{name}"' in head for name in (*PROMPT_FORMS, "body")):
        return None
    return ConfigError(
        f"{path} is a trace (format {kind.name}): it has lengths and no prompts; to serve random prompts of "
        f"these lengths: medha bench serve --dataset-path {path}, to simulate: medha simulate --dataset-path {path}"
    )


def _is_pipe(stream: TextIO | None) -> bool:
    """Whether somebody has put something into standard input; a terminal, or nothing at all, is not meant."""
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


_LOST = ("EngineDeadError", "PlanDivergenceError", "RankFailedError")  # errors of a run, not of a request


@dataclass(slots=True)
class Earlier:
    """What an earlier run did.

    Attributes:
        dropped: numbers of the lines to drop: of requests that were aborted or lost with the engine, and a torn end.
    """

    done: set[str] = field(default_factory=set)  # ids of the requests whose lines stand
    num_failed: int = 0  # how many of these lines hold an error, which is final: the request's own
    dropped: set[int] = field(default_factory=set)

    def left(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """The requests that have no line yet, in time as they were, but that the first of them arrives at once."""
        left = [arrival for arrival in arrivals if arrival.request_id not in self.done]
        return [replace(arrival, arrival_s=arrival.arrival_s - left[0].arrival_s) for arrival in left]


def read_earlier(path: Path, arrivals: Sequence[Arrival]) -> Earlier:
    """What an output file of JSON lines, which need not be there yet, says of the requests that the run was of.

    Raises:
        ConfigError: the file cannot be read, or is not the output of these requests.
    """
    asked = {arrival.request_id for arrival in arrivals}
    earlier = Earlier()
    for number, line in _lines(path):
        fields = _fields(line)
        if not line.endswith(b"\n"):  # the last one, torn
            earlier.dropped.add(number)
        elif fields is None:
            raise _not_ours(path, number, f"{line[:40]!r} is no output line")
        elif fields["id"] not in asked or fields["id"] in earlier.done:
            reason = "there twice" if fields["id"] in earlier.done else "not among the requests"
            raise _not_ours(path, number, f"id {fields['id']!r:.80} is {reason}")
        elif _was_cut_short(fields):
            earlier.dropped.add(number)
        else:
            earlier.done.add(fields["id"])
            earlier.num_failed += fields.get("error") is not None
    return earlier


def drop_lines(path: Path, dropped: Set[int]) -> None:
    """Rewrite an output file without some of its lines; whoever is killed meanwhile has the file as it was."""
    if not dropped:
        return
    target = path.resolve()
    with replacing(target, "output file") as part:
        with part.open("wb") as file:
            file.writelines(line for number, line in _lines(target) if number not in dropped)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, part)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers."""
    try:
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"output file {path}: {error.strerror}") from error


def _fields(line: bytes) -> dict[str, Any] | None:
    """What an output line says; None where it is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(fields, dict) and isinstance(fields.get("id"), str) and "finish_reason" in fields
    outputs = fields.get("outputs", []) if is_ours else None
    return fields if isinstance(outputs, list) and all(isinstance(one, dict) for one in outputs) else None


def _was_cut_short(fields: dict[str, Any]) -> bool:
    """Whether the run ended before the request did, with all of its completions."""
    error, outputs = fields.get("error"), fields.get("outputs", [])
    is_lost = isinstance(error, dict) and error.get("type") in _LOST
    return is_lost or any(one.get("finish_reason") == "abort" for one in (fields, *outputs))


def _not_ours(path: Path, number: int, reason: str) -> ConfigError:
    accepted = "what a run of the same requests wrote, or --overwrite"
    return ConfigError(f"output file {path} line {number}: {reason}; accepted: {accepted}")
