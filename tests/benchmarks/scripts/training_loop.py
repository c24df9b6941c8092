"""A DistributedDataParallel training loop that measures itself; the same text for a cell and for torchrun.

The data has the shape of scikit-learn's handwritten digits: 1,437 images of 64 numbers, ten classes.
"""

from __future__ import annotations


def loop_seconds(rank: int, world_size: int, steps: int) -> float:
    """Train a small network; the seconds of `steps` steps on this rank, after 30 that are not counted."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)  # what torchrun gives each rank
    torch.manual_seed(0)
    images, digits = torch.rand(1437, 64) * 16, torch.randint(0, 10, (1437,))
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mine = torch.arange(rank, len(images), world_size)
    started = 0.0
    for step in range(-30, steps):
        if step == 0:
            dist.barrier()
            started = time.perf_counter()
        chosen = mine[torch.randint(0, len(mine), (64,))]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[chosen]), digits[chosen])
        loss.backward()
        optimizer.step()
    dist.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    import json
    import sys

    import torch.distributed as dist

    dist.init_process_group("gloo")
    seconds = loop_seconds(dist.get_rank(), dist.get_world_size(), int(sys.argv[1]))
    if dist.get_rank() == 0:
        print("BENCH-RESULT " + json.dumps({"loop_s": seconds}), flush=True)
    dist.destroy_process_group()
