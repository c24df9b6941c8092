"""Ray's client: a 1 GiB tensor over its port to four warm actors that read a number of each MiB.

The argument is how often; prints `{"seconds": [...]}`.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch

FLOATS = 2**28


@ray.remote(num_cpus=1)
class Rank:
    def touch(self, tensor: torch.Tensor) -> float:
        return float(tensor[::262144].sum())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


with tempfile.TemporaryDirectory(prefix="ry", dir="/tmp") as folder:
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--block", "--num-cpus=4", f"--object-store-memory={3 * 2**30}"),
        *("--include-dashboard=false", f"--temp-dir={folder}", f"--port={free_port()}"),
        f"--ray-client-server-port={port}",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as head:
        try:
            until = time.monotonic() + 60
            while True:
                try:
                    ray.init(f"ray://127.0.0.1:{port}")
                    break
                except ConnectionError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.5)
            ranks = [Rank.remote() for _ in range(4)]
            ray.get([rank.touch.remote(torch.zeros(1024)) for rank in ranks])
            big = torch.randint(0, 1000, (FLOATS,), dtype=torch.int16).float()
            seconds = []
            for _ in range(int(sys.argv[1])):
                big += 1
                started = time.perf_counter()
                shared = ray.put(big)
                sums = ray.get([rank.touch.remote(shared) for rank in ranks])
                seconds.append(time.perf_counter() - started)
                if sums != [float(big[::262144].sum())] * 4:
                    raise SystemExit("wrong content")
                del shared
            ray.shutdown()
        finally:
            head.terminate()
print("BENCH-RESULT " + json.dumps({"seconds": seconds}), flush=True)
