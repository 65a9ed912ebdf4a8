"""What every verb of ``medha bench`` refuses, by the name of what is wrong."""

import shlex

import pytest

from medha.bench.cli import app
from medha.cli.command import run_app
from tests.bench.shapes import ON_TINY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare --dtype float64", "dtype='float64'; accepted"),
        ("compare --peer sglang", "peer='sglang'; accepted: transformers, vllm"),
        ("compare --input-len none --batch-size 0 --num-prompts 0", "all left out; accepted"),
        ("compare --input-len 0", "input_len='0'; accepted"),
        ("compare --lengths nothing", "lengths='nothing'; accepted"),
        ("compare --request-rate 2", "with peer=transformers and num_prompts=200, input_len=2048,16384; accepted"),
        (
            "compare --peer vllm --request-rate 2 --input-len none",
            "num_prompts=200, input_len=none; accepted: with peer=vllm, requests that arrive and a prompt beside them",
        ),
        ("compare --request-rate 2 --peer vllm --num-prompts=0", "with peer=vllm and num_prompts=0"),
        ("compare --engine-options '{x'", "engine_options '{x': not JSON"),
        ("compare --engine-options '[]'", "engine_options '[]': holds a list"),
        ("""compare --engine-options '{"vllm": {}}'""", "engine_options of vllm; accepted: of medha"),
        ("latency --input-len 0", "input_len='0'; accepted: positive integers"),
        ("latency --random-input-len 0", "input_len='0'; accepted: positive integers"),
        ("latency --output-json absent/latency.json", "absent/latency.json cannot be written"),
        ("latency --load-format safetensors", "load_format='safetensors' without a model"),
        ("latency --dtype int8", "dtype='int8'; accepted"),
        ("latency --policy lifo", "policy"),
        ("latency --t-target-s 0", "t_target_s=0.0; accepted"),
        ("latency --model absent-folder/model", "absent-folder/model"),
        ("micro attention --dtype float64", "dtype='float64'; accepted"),
        ("micro attention --device cuda:99", "device='cuda:99'; accepted"),
        ("micro attention --chunk-size 64 --kv-lens 8,32", "chunk_size=64; accepted: one up to kv_lens, 32"),
        ("micro sampling --batch-size x", "batch_size='x'; accepted"),
        ("micro scheduler --policy larz", "policy='larz'; accepted: "),
        ("micro scheduler --num-waiting 0", "num_waiting='0'; accepted: positive integers"),
        ("micro sampling --num-iters 0", "num_iters=0; accepted: an integer from 1"),
        ("scaling --attention rings", "attention='rings'; accepted: gather, ring, or both"),
        ("scaling --attention ring --mode decode", "accepted: prefill and chunk, as decodes gather"),
        ("scaling --attention ring --layouts spp2", "with chunks of 512; accepted: kvp of 2 at least"),
        ("scaling --attention ring --chunk-size 3", "on kvp2 with chunks of 3; accepted: "),
        ("scaling --layouts ,", "layout ','; accepted: for example spp2"),
        ("scaling --layouts tp3", "tp=3"),
        ("scaling --mode train", "mode='train'; accepted: prefill, decode, chunk"),
        ("scaling --mode decode --input-len 256", "256 tokens over 2 groups in blocks of 256"),
        ("serve --trace x --output-json ./x", "output file x is x, which is read; accepted: another file"),
        ("serve --request-rate 0", "request_rate=0.0; accepted: requests a second above 0, or inf"),
        ("serve --request-rate nan", "request_rate=nan; accepted"),
        ("serve --request-rate 1 --burstiness 0", "burstiness=0.0; accepted"),
        ("serve --metric-percentiles 50,p99", "metric_percentiles='p99'; accepted"),
        ("serve --metric-percentiles 100", "metric_percentiles='100'; accepted"),
        ("serve --percentile-metrics ttft,ttfb", "percentile_metrics='ttfb'; accepted: ttft, tpot, itl, e2el"),
        ("serve --goodput ttfb:3", "goodput='ttfb:3'; accepted"),
        ("serve --goodput ttft:0", "goodput='ttft:0'; accepted"),
        ("serve --goodput ttft:1 ttft:2", "goodput='ttft:2'; accepted"),
        ("serve --preset train", "preset='train'; accepted: convoy"),
        ("serve --preset convoy --long-len 500", "long_len=500; accepted: above 500"),
        ("serve --load 0.5", "long_len, load=(32768, 0.5) without a preset; accepted"),
        ("serve --preset convoy --load 0", "load=0.0; accepted"),
        ("serve --preset convoy --scheduler cdsp", "scheduler='cdsp' with preset=convoy; accepted"),
        (
            "serve --preset convoy --goodput ttft:9 --request-rate 3",
            "goodput=['ttft:9'], request_rate=3.0 with preset=convoy; accepted: without",
        ),
        ("serve --save-result --input-len 2", "--save-result is not among medha's options: "),
        ("serve --backend vllm", "--backend vllm is not among medha's options: bench runs medha itself"),
        ("throughput --dataset-path absent.csv", "absent.csv"),
        ("throughput --trace x --lengths fixed:1,1", "a trace and lengths='fixed:1,1' are both given"),
        ("throughput --lengths fixed:1,1 --input-len 2", "input_len, output_len=(2, 128) beside a trace"),
        ("throughput --num-prompts 2 --num-kv-blocks 1 --input-len 600", "has failed"),
    ],
)
def test_bad_input(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    takes_threads = not any(verb in arguments for verb in ("scaling", "micro scheduler"))
    assert run_app(app, "bench", [*shlex.split(arguments), *(ON_TINY if takes_threads else [])]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
