"""Ray: a 1 GiB tensor to four warm actors that touch every page of it; the argument is how often.

Prints `{"seconds": [...]}`.
"""

import json
import sys
import tempfile
import time

import ray
import torch

FLOATS = 2**28
FLOATS_PER_PAGE = 1024


@ray.remote(num_cpus=1)
class Rank:
    def touch(self, tensor: torch.Tensor) -> float:
        return float(tensor[::FLOATS_PER_PAGE].sum())


with tempfile.TemporaryDirectory(prefix="ry", dir="/tmp") as folder:
    ray.init(
        num_cpus=4,
        object_store_memory=3 * 2**30,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    ranks = [Rank.remote() for _ in range(4)]
    ray.get([rank.touch.remote(torch.zeros(FLOATS_PER_PAGE)) for rank in ranks])
    big = torch.zeros(FLOATS)
    seconds = []
    for round_number in range(1, int(sys.argv[1]) + 1):
        big.add_(1)
        started = time.perf_counter()
        shared = ray.put(big)
        sums = ray.get([rank.touch.remote(shared) for rank in ranks])
        seconds.append(time.perf_counter() - started)
        if sums != [round_number * FLOATS / FLOATS_PER_PAGE] * 4:
            raise SystemExit("wrong content")
        del shared
    ray.shutdown()
print("BENCH-RESULT " + json.dumps({"seconds": seconds}), flush=True)
