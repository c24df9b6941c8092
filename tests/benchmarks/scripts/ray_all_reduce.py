"""Ray's own ways to an all_reduce of four ranks on a cluster that is there: actors, or `TorchTrainer`.

`ray_all_reduce.py ADDRESS actors|trainer COUNT` prints `{"seconds": [...]}`: from the call to the sum, all of it, as a
cell pays it each time.
"""

import json
import socket
import sys
import tempfile
import time

import ray

RANKS = 4


@ray.remote(num_gpus=1)
class Rank:
    def address(self) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def all_reduce(self, rank: int, address: str) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()


def actors() -> float:
    ranks = [Rank.remote() for _ in range(RANKS)]
    address = ray.get(ranks[0].address.remote())
    sums = ray.get([rank.all_reduce.remote(number, address) for number, rank in enumerate(ranks)])
    for rank in ranks:
        ray.kill(rank)
    return sums[0]


def trainer() -> float:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def loop() -> float:
        import torch
        import torch.distributed as dist

        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    with tempfile.TemporaryDirectory(prefix="ry", dir="/tmp") as folder:
        result = TorchTrainer(
            loop,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=RANKS, use_gpu=False),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    # of rank 0
    return float(result.return_value)


work = {"actors": actors, "trainer": trainer}[sys.argv[2]]
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
seconds = []
for _ in range(int(sys.argv[3])):
    started = time.perf_counter()
    total = work()
    seconds.append(time.perf_counter() - started)
    if total != RANKS:
        raise SystemExit(f"wrong sum: {total}")
ray.shutdown()
print("BENCH-RESULT " + json.dumps({"seconds": seconds}), flush=True)
