"""A DistributedDataParallel training loop that measures itself; the same text for a cell and for torchrun.

The data has the shape of scikit-learn's handwritten digits: 1,437 images of 64 numbers, ten classes.
"""

from __future__ import annotations

from collections.abc import Callable


def trainer(rank: int, world_size: int) -> Callable[[int], float]:
    """Prepare a small network and train 30 steps.

    Returns:
        Trains so many steps, and returns the seconds that they took on this rank.
    """
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

    def train(steps: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            chosen = mine[torch.randint(0, len(mine), (64,))]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[chosen]), digits[chosen])
            loss.backward()
            optimizer.step()
        dist.barrier()
        return time.perf_counter() - started

    train(30)
    return train


def loop_seconds(rank: int, world_size: int, steps: int) -> float:
    """Train; the seconds of `steps` steps on this rank, after 30 that are not counted."""
    return trainer(rank, world_size)(steps)


def train_on_request(rank: int, world_size: int, steps: int, address: str) -> None:
    """Train `steps` steps for each byte from the Unix socket `address`, and answer with a line: their seconds.

    Rank 0 connects; the others wait in a collective. All return when the socket closes.
    """
    import socket

    import torch
    import torch.distributed as dist

    train = trainer(rank, world_size)
    with socket.socket(socket.AF_UNIX) as requests:
        if rank == 0:
            requests.connect(address)
        while True:
            goes_on = torch.tensor([len(requests.recv(1)) if rank == 0 else 0])
            dist.broadcast(goes_on, 0)
            if not goes_on.item():
                return
            seconds = train(steps)
            if rank == 0:
                requests.sendall(f"{seconds}\n".encode())


if __name__ == "__main__":
    import sys

    import torch.distributed as dist

    dist.init_process_group("gloo")
    train_on_request(dist.get_rank(), dist.get_world_size(), int(sys.argv[1]), sys.argv[2])
    dist.barrier()
    dist.destroy_process_group()
