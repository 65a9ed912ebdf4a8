"""Two hosts on one machine: network namespaces joined by a cable that is slow, loses frames, or is cut.

    python -m tools.two_hosts --delay-ms 1 --rate-mbit 1000 --nproc-per-node 2 -- -m medha.verify --tp 2 --spp 2
    python -m tools.two_hosts --loss 0.01 --nproc-per-node 1 -- -m medha bench latency --spp 2
    python -m tools.two_hosts --cut-after-s 20 --nproc-per-node 1 -- -m medha bench latency --spp 2

Runs ``torchrun --nnodes 2`` with what stands behind ``--``, a node in each namespace. Each has a host name, an address
and a TAP device of its own; a relay hands the frames of one device to the other, so the kernel needs no netem. Both
nodes share this machine's cores, memory and clock. Prints what the nodes print, then a line of JSON: the exit code and
seconds of each node, frames and bytes each way. Exits with the greater code. Needs root, or ``unshare -r`` before it.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tools.command import main

HOSTS = ("left", "right")
SUBNET = "10.77.0"  # node i has address i + 1
PORT = 29500
MTU = 1500
_FRAME = MTU + 64
_DEVICE = "tap0"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_QUEUE_S = 0.2  # seconds of frames that wait for the cable before it drops more, as a switch would


@dataclass
class Way:
    """One direction of the cable.

    Attributes:
        source: TAP device whose frames it takes.
        target: and the one that gets them.
        due: frames on their way, ascending, as the delay is the same for all.
    """

    source: int
    target: int
    delay_s: float
    bytes_per_s: float
    loss: float
    free_at_s: float = 0.0  # when the cable has sent what it has
    num_frames: int = 0
    num_bytes: int = 0
    num_lost: int = 0
    due: deque[tuple[float, bytes]] = field(default_factory=deque, init=False, repr=False)

    def take(self, frame: bytes, now_s: float, chance: random.Random) -> None:
        """A frame enters the cable, or is lost."""
        starts_s = max(now_s, self.free_at_s)
        if chance.random() < self.loss or starts_s - now_s > _QUEUE_S:
            self.num_lost += 1
            return
        self.free_at_s = starts_s + len(frame) / self.bytes_per_s
        self.due.append((self.free_at_s + self.delay_s, frame))

    def give(self, now_s: float) -> float | None:
        """Hand over what is due; returns seconds until the next frame is, None where the cable is empty."""
        while self.due and self.due[0][0] <= now_s:
            frame = self.due.popleft()[1]
            try:
                os.write(self.target, frame)
            except BlockingIOError:
                self.num_lost += 1
                continue
            self.num_frames, self.num_bytes = self.num_frames + 1, self.num_bytes + len(frame)
        return max(0.0, self.due[0][0] - now_s) if self.due else None


def relay(ways: Sequence[Way], cut: threading.Event, over: threading.Event, seed: int) -> None:
    """Hand frames over until ``over``; from ``cut`` on nothing passes, in either direction."""
    chance, wait_s = random.Random(seed), 0.1
    with selectors.DefaultSelector() as selector:
        for way in ways:
            selector.register(way.source, selectors.EVENT_READ, way)
        while not over.is_set():
            for key, _ in selector.select(wait_s):
                now_s = time.monotonic()
                with suppress(BlockingIOError):
                    while True:
                        frame = os.read(key.fd, _FRAME)
                        if not cut.is_set():
                            key.data.take(frame, now_s, chance)
            waits_s = [way.give(time.monotonic()) for way in ways]
            wait_s = min([one for one in waits_s if one is not None], default=0.1)


def _sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


def open_tap(namespace: str) -> int:
    """A TAP device in a namespace, as the file descriptor that its frames are read from and written to."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    made = fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"medha%d", _IFF_TAP | _IFF_NO_PI))
    _sh(f"ip link set {made[:16].rstrip(bytes(1)).decode()} netns {namespace} name {_DEVICE}")
    return tap


def set_up(namespaces: Sequence[str]) -> list[int]:
    """Make the namespaces with an address and names of both hosts in each; returns their TAP devices."""
    taps = []
    for i, name in enumerate(namespaces):
        _sh(f"ip netns add {name}")
        taps.append(open_tap(name))
        _sh(f"ip -n {name} link set lo up; ip -n {name} addr add {SUBNET}.{i + 1}/24 dev {_DEVICE}")
        _sh(f"ip -n {name} link set {_DEVICE} mtu {MTU} up")
        hosts = Path("/etc/netns") / name / "hosts"
        hosts.parent.mkdir(parents=True)
        lines = [f"{SUBNET}.{k + 1} {host}" for k, host in enumerate(HOSTS)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    return taps


def tear_down(namespaces: Sequence[str]) -> None:
    """End what still runs in the namespaces, and remove them."""
    for name in namespaces:
        _sh(f"ip netns pids {name} | xargs -r kill -9; ip netns del {name}; rm -rf /etc/netns/{name}")


def start_node(i: int, namespace: str, num_ranks: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start torchrun on one of the hosts."""
    where = ("--nnodes", "2", "--node-rank", str(i), "--nproc-per-node", str(num_ranks))
    rendezvous = ("--master-addr", f"{SUBNET}.1", "--master-port", str(PORT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *rendezvous, *arguments]
    named = ["unshare", "--uts", "sh", "-c", f'hostname {HOSTS[i]}; exec "$@"', "sh", *torchrun]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": _DEVICE}
    return subprocess.Popen(["ip", "netns", "exec", namespace, *named], env=env)


def two_hosts(
    command: list[str],
    delay_ms: float = 0.0,
    rate_mbit: float = 10_000.0,
    loss: float = 0.0,
    cut_after_s: float | None = None,
    nproc_per_node: int = 1,
    seed: int = 0,
) -> int:
    """Run a job of torchrun on two hosts; what it runs stands behind --. Delay and rate of the cable are each way,
    --loss is a share of its frames, drawn by --seed, and with --cut-after-s it is cut then."""
    namespaces = [f"medha-{os.getpid()}-{host}" for host in HOSTS]
    cut, over = threading.Event(), threading.Event()
    with ExitStack() as stack:
        stack.callback(tear_down, namespaces)
        taps = set_up(namespaces)
        cable = delay_ms / 1e3, rate_mbit * 1e6 / 8, loss
        ways = [Way(taps[0], taps[1], *cable), Way(taps[1], taps[0], *cable)]
        relaying = threading.Thread(target=relay, args=(ways, cut, over, seed))
        relaying.start()
        stack.callback(relaying.join)  # before its devices go with their namespaces
        stack.callback(over.set)
        start_s = time.monotonic()
        nodes = [start_node(i, name, nproc_per_node, command) for i, name in enumerate(namespaces)]
        ended_s: dict[int, float] = {}
        while len(ended_s) < len(nodes):
            now_s = time.monotonic() - start_s
            if cut_after_s is not None and now_s >= cut_after_s and not cut.is_set():
                cut.set()
                print(f"two_hosts: the cable is cut after {now_s:.1f} s", file=sys.stderr, flush=True)
            ended_s |= {i: now_s for i, node in enumerate(nodes) if i not in ended_s and node.poll() is not None}
            time.sleep(0.05)
        codes = [node.wait() for node in nodes]
        report = {"exit_codes": codes, "seconds": [round(ended_s[i], 2) for i in range(len(nodes))]}
        report |= {name: [getattr(way, name) for way in ways] for name in ("num_frames", "num_bytes", "num_lost")}
        print(json.dumps(report), flush=True)
        return max(map(abs, codes))


if __name__ == "__main__":
    main(two_hosts)
