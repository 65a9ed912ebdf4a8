"""``medha serve MODEL``, also ``torchrun … -m medha.serve MODEL``: an OpenAI-compatible server over any layout.

Rank 0 listens; its main thread steps the engine, another one has the event loop. A first signal lets running requests
end, a second one ends them. Exit codes: :mod:`medha.cli.command`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from medha.cli.command import end_process, first_interrupt, make_app, run_app, start_logging, state_on_signal
from medha.cli.options import DEALT, MEMORY, MODEL, PARALLEL, SCHEDULING, SERVING, LogLevel, ModelArgument, takes
from medha.errors import ConfigError, RankFailedError
from medha.generate.__main__ import asked_config
from medha.parallel.launch import is_first_rank
from medha.parallel.own_ranks import own_ranks

logger = logging.getLogger("medha")
app = make_app()
_PACKAGES = ("starlette", "uvicorn", "httptools", "uvloop", "msgspec", "prometheus_client")
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_OTHER_FILES = 256  # open beside those of connections
_option = partial(typer.Option, rich_help_panel="Server")
Texts = list[str] | None


@app.command()
@takes(MODEL, MEMORY, SCHEDULING, SERVING, PARALLEL, DEALT)
def serve(
    context: typer.Context,
    model_argument: ModelArgument = None,
    host: Annotated[str, _option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, _option(help="Port; 0 is any.", min=0, max=65535)] = 8000,
    api_key: Annotated[Texts, _option(help="Let in who has it; may be repeated.", envvar="MEDHA_API_KEY")] = None,
    key_file: Annotated[Path | None, _option(help="TOML: keys with their tenants, objectives, limits.")] = None,
    served_model_name: Annotated[Texts, _option(help="What clients call it; may be repeated.")] = None,
    allowed_host: Annotated[Texts, _option(help="Name in the Host header, or *; by default a loopback's own.")] = None,
    max_body_bytes: Annotated[int, _option(help="Of a request.", min=1)] = 128 << 20,
    max_concurrent: Annotated[int, _option(help="Requests open at once.", min=1)] = 4096,
    max_connections: Annotated[int, _option(help="At once.", min=1)] = 8192,
    shutdown_timeout: Annotated[float, _option(help="Seconds for running requests after a signal.", min=0)] = 25.0,
    stall_timeout: Annotated[float, _option(help="Seconds without a batch after which it ends.", min=1)] = 600.0,
    ssl_keyfile: Annotated[Path | None, _option(help="TLS.")] = None,
    ssl_certfile: Annotated[Path | None, _option(help="TLS.")] = None,
    log_level: LogLevel = "info",
    **given: Any,
) -> int:
    """Serve a Hugging Face checkpoint over HTTP as OpenAI does: /v1/completions, /v1/chat/completions, /metrics."""
    start_logging(log_level)
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"the server needs {', '.join(missing)}; install medha[serve]")
    config, options, launch = asked_config(context, model_argument, given)
    if not is_first_rank():
        from medha.generate.follow import follow

        return follow(config)
    from medha.engine.build import build_role
    from medha.serve.app import Front
    from medha.serve.keys import load_keys
    from medha.serve.web import bound, host_names, listening

    if not api_key and "MEDHA_API_KEY" in os.environ:
        raise ConfigError("MEDHA_API_KEY is empty; accepted: a key, or no such variable")
    keys = load_keys(api_key or [], key_file)
    if (ssl_keyfile is None) is not (ssl_certfile is None):
        raise ConfigError("one of ssl_keyfile and ssl_certfile is given; accepted: both, or none")
    if not all(name.strip() for name in served_model_name or ()):
        raise ConfigError("a served_model_name is empty; accepted: text, or no such option")
    _allow_files(max_connections)
    with ExitStack() as stack:
        listener = stack.enter_context(bound(host, port))
        is_local = ip_address(listener.getsockname()[0]).is_loopback
        hosts = host_names(allowed_host or ((host, *_LOCAL) if is_local else ()))
        limits = {"max_body_bytes": max_body_bytes, "max_concurrent": max_concurrent}
        if launch is None and config.parallel.world_size > 1:
            stack.enter_context(own_ranks(config.parallel.world_size, ["medha.generate.follow", json.dumps(options)]))
        role = build_role(config)
        assert role.engine is not None, "the first rank has the engine"
        front = Front(role.engine, served_model_name or [config.model], keys, hosts=hosts, **limits)
        if role.part is not None:
            role.part.ranks.monitor.before_end = lambda message: front.fail(RankFailedError(message))
        stack.callback(front.service.preparing.close)
        stack.callback(front.bodies.close)
        interrupted = stack.enter_context(first_interrupt(also_terminate=True))
        stack.enter_context(state_on_signal(role.describe))
        tls = {"ssl_keyfile": ssl_keyfile, "ssl_certfile": ssl_certfile}
        stack.enter_context(listening(front, listener, max_connections=max_connections, **tls))
        stack.callback(front.service.cut)  # whenever a second signal comes
        threading.Thread(target=front.watch, args=(stall_timeout,), name="medha-stall", daemon=True).start()
        scheme = "http" if ssl_certfile is None else "https"
        where = f"[{host}]" if ":" in host else host
        logger.info("serving %s at %s://%s:%d", front.models[0], scheme, where, listener.getsockname()[1])
        service = front.service
        service.run(lambda: bool(interrupted))
        service.is_draining = True
        logger.info("stopping: %d requests have %g s to end", front.num_open.total(), shutdown_timeout)
        until_s = time.monotonic() + shutdown_timeout
        service.run(lambda: not front.num_open.total() or time.monotonic() > until_s)
        service.cut()
        service.run(lambda: not service.engine.has_unfinished)  # what is in flight, on every rank
        role.close()  # before the ranks that were started here are waited for
    return 0


def _allow_files(max_connections: int) -> None:
    """Raise the limit of open files to what connections need, as far as that may be, and warn where it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted, no_limit = max_connections + _OTHER_FILES, resource.RLIM_INFINITY
    if soft == no_limit or soft >= wanted:
        return
    with suppress(OSError, ValueError):  # macOS has another limit beside this one
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == no_limit else min(wanted, hard), hard))
    if (soft := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < wanted:
        told = "max_connections=%d needs %d open files, the limit is %d (ulimit -Hn): connections beyond it are closed"
        logger.warning(told, max_connections, wanted, soft)


if __name__ == "__main__":
    end_process(run_app(app, "python -m medha.serve"))
