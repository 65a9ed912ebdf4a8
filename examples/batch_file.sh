#!/usr/bin/env bash
# Serve a file of requests; every answer becomes a line of JSON. The model is written to a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python}

"$python" -c "from pathlib import Path; from medha.models.needle import write_needle; write_needle(Path('$work/needle'))"
"$python" -m medha.generate "$work/needle" --max-model-len 1024 --max-tokens 32 \
  --requests examples/requests.jsonl --output "$work/answers.jsonl"
cat "$work/answers.jsonl"
