"""A policy of your own against LARS, on eight H100 that are not there: 200 requests, a few of them very long."""

import numpy as np

from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation
from medha.workload.synth import synthesize


def old_and_short_first(columns, now_s):
    return columns.work_left_s - 0.1 * (now_s - columns.arrival_s)  # one key a request; the smallest is served first


trace = synthesize("medha-mix", qps=0.3, num_requests=200)
is_long = trace.prompt_tokens > 8192
for name, policy in (("LARS", "lars"), ("old and short first", old_and_short_first)):
    config = SchedulerConfig(policy=policy)
    replica = Replica(load_spec("h100-80g"), find_model("llama-3-8b"), ParallelConfig(tp=8), config)
    requests = Simulation(*replica.build(), trace).run().requests
    ttft_s = requests.first_token_s - trace.arrival_s
    in_time = (ttft_s <= requests.deadline_s).mean()
    short, long = (np.percentile(ttft_s[chosen], [50, 99]) for chosen in (~is_long, is_long))
    figures = f"{short[0]:.2f} and {short[1]:.2f} s, of long prompts {long[0]:.1f} and {long[1]:.1f} s"
    print(f"{name}: TTFT P50 and P99 of short prompts {figures}; {in_time:.0%} in time")
