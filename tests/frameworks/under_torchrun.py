"""A training under torchrun: `torchrun --nproc-per-node 2 under_torchrun.py NAME FOLDER` saves each rank's result."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import trainings

if __name__ == "__main__":
    parameters = getattr(trainings, sys.argv[1])()
    torch.save(parameters, Path(sys.argv[2]) / f"rank-{os.environ['RANK']}.pt")
    if dist.is_initialized():
        dist.barrier()
    # torch 2.13's gloo now and then aborts at the interpreter's exit where there are several groups
    os._exit(0)
