"""For torchrun: start, one all_reduce, end."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
if value.item() != dist.get_world_size():
    raise SystemExit("wrong sum")
dist.destroy_process_group()
