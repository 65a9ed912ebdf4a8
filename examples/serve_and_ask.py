"""Start a server with a tiny model, and talk to it: an answer, a stream, and how far a long prompt is.

python -m examples.serve_and_ask    (needs medha[serve]; no download)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from http.client import HTTPConnection
from pathlib import Path

from medha.models.needle import make_haystack, write_needle


def ask(port: int, path: str, body: dict[str, object]):
    """The answer of the server, whose body can be read."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection.getresponse()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_needle(Path(folder))
        command = [sys.executable, "-m", "medha.serve", folder, "--port", "0", "--max-model-len", "64K"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        try:
            said = ""
            while "serving" not in (line := server.stderr.readline()):
                if not line:
                    sys.exit(f"the server has ended: {said.strip()}")
                said = line
            port = int(line.rpartition(":")[2])  # any that is free
            prompt = "The code of Ada is 31.\nThe code of Ada is"
            print(json.load(ask(port, "/v1/completions", {"prompt": prompt, "max_tokens": 8}))["choices"][0]["text"])
            document = make_haystack(8_000, depth=0.3, seed=0).prompt
            body = {"prompt": document, "max_tokens": 16, "stream": True, "return_progress": True}
            for line in ask(port, "/v1/completions", body):
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    for choice in event["choices"]:
                        print(choice["text"], end="", flush=True)
                    if progress := event.get("prompt_progress"):
                        print("{processed:,} of {total:,} tokens read, {eta_s:.1f} s to go".format(**progress))
            print()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
