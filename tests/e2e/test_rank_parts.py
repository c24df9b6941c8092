"""One rank's part is never taken for the whole: what is sharded over ranks leaves them, and comes back to them."""

from __future__ import annotations

import re

import pytest
from kernels import Kernel

SHARDED = """
import torch, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
mesh = init_device_mesh("cpu", (world_size,))
fully_shard(model, mesh=mesh)
"""
FORGOTTEN = SHARDED + "for p in model.parameters(): nn.init.zeros_(p)\n"
WHOLE = re.compile(r"take the whole from torch\S+\.(get_model_state_dict\(.*?\)\))")
COMPARED = "same = all(torch.equal(p.full_tensor(), whole[n]) for n, p in model.state_dict().items())\n"


def error(kernel: Kernel, cell: str) -> str:
    return kernel.run(cell).shown


@pytest.mark.slow
def test_a_shard_is_reported_when_it_leaves_and_refused_when_it_comes_back(kernel: Kernel):
    made = kernel.check(f"%%distributed -n 2 --out sd,whole --ui text\n{SHARDED}sd = model.state_dict()")
    assert "sd['0.weight'] is a sharded DTensor over 2 ranks" in made.text
    refused = error(kernel, f"%%distributed -n 2 --ui none\n{FORGOTTEN}model.load_state_dict(sd)")
    assert "`sd` can't go to the ranks: sd['0.weight'] is a sharded DTensor" in refused
    assert "the part of rank 0: every rank would take it for its own" in refused
    assert WHOLE.search(refused)


@pytest.mark.slow
def test_both_remedies_for_a_shard_work(kernel: Kernel):
    kernel.check(f"%%distributed -n 2 --out sd,whole --ui none\n{SHARDED}sd = model.state_dict()")
    call = WHOLE.search(error(kernel, "%%distributed -n 2 --ui none\nsd"))
    assert call is not None
    state = (
        "from torch.distributed.checkpoint.state_dict import *\nfrom torch.distributed.checkpoint import state_dict\n"
    )
    kernel.check(f"%%distributed -n 2 --out sd --ui none\n{SHARDED}{state}sd = state_dict.{call[1]}")
    load = "state_dict.set_model_state_dict(model, sd, options=StateDictOptions(full_state_dict=True))\n"
    kernel.check(f"%%distributed -n 2 --out same:all --ui none\n{FORGOTTEN}{state}{load}{COMPARED}")
    assert kernel.value("same") == [True, True]
    kernel.check(f"%%distributed -n 2 --out sd:all --ui none\n{SHARDED}sd = model.state_dict()")
    kernel.check(f"%%distributed -n 2 --out same:all --ui none\n{FORGOTTEN}model.load_state_dict(sd[rank])\n{COMPARED}")
    assert kernel.value("same") == [True, True]


@pytest.mark.slow
def test_parts_arrive_at_their_own_ranks(kernel: Kernel):
    kernel.check(
        "%%distributed -n 2 --out parts:all,mine --ui none\n"
        "import torch\n"
        "from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "parts = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])\n"
        "mine = parts.to_local()"
    )
    kernel.check(
        "%%distributed -n 2 --out seen:all --ui none\n"
        "part = parts[rank]\n"
        "try: parts[1 - rank] + 1\n"
        "except TypeError as error: refused = str(error)\n"
        "seen = [part.full_tensor().tolist(), part.device_mesh.get_coordinate(), refused]"
    )
    for rank, (whole, coordinate, refused) in enumerate(kernel.value("seen")):
        assert (whole, coordinate) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [rank])
        assert f"a sharded DTensor of rank {1 - rank}, which rank {rank} can't use" in refused
    assert "cut for 2 ranks" in error(kernel, "%%distributed -n 1 --ui none\nparts[0]")
    assert "the run has 3 ranks" in error(kernel, "%%distributed -n 3 --ui none\nparts[0]")


SIBLINGS = (
    SHARDED
    + """
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
of_optimizer = get_optimizer_state_dict(model, optimizer)
plain_of_optimizer = optimizer.state_dict()
gradients = [p.grad for p in model.parameters()]
summand = DTensor.from_local(torch.ones(2), mesh, [Partial()])
replicated = distribute_tensor(torch.ones(2), mesh, [Replicate()])
inside = Holder(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
of_submesh = distribute_tensor(torch.ones(4), two["model"], [Shard(0)])
not_cut = distribute_tensor(torch.ones(4), two["data"], [Shard(0)])
loader = DataLoader(range(8), sampler=DistributedSampler(range(8)))
"""
)
PARTS = ("of_optimizer", "plain_of_optimizer", "gradients", "summand", "inside", "of_submesh", "loader")
WHOLES = ("replicated", "not_cut", "mesh", "two")


@pytest.mark.slow
def test_every_kind_of_part_is_known(kernel: Kernel):
    kernel.check("class Holder:\n    def __init__(self, held): self.held = held")
    names = ",".join((*PARTS, *WHOLES))
    kernel.check(f"%%distributed -n 2 --out {names} --ui none\n{SIBLINGS}")
    for name in PARTS:
        assert f"`{name}` can't go to the ranks" in error(kernel, f"%%distributed -n 2 --ui none\n{name}"), name
    assert "inside.held is a sharded DTensor" in error(kernel, "%%distributed -n 2 --ui none\ninside")
    assert "loader.sampler is a DistributedSampler of rank 0" in error(kernel, "%%distributed -n 2 --ui none\nloader")
    kernel.check(
        "%%distributed -n 2 --out seen:all --ui none\n"
        "from torch.distributed.tensor import Shard\n"
        "cut = replicated.redistribute(placements=[Shard(0)])\n"
        "seen = [replicated.full_tensor().tolist(), not_cut.to_local().tolist(), mesh.get_local_rank(), "
        "two.get_coordinate(), tuple(cut.to_local().shape)]"
    )
    for rank, seen in enumerate(kernel.value("seen")):
        assert seen == [[1.0, 1.0], [1.0] * 4, rank, [0, rank], [1]]


@pytest.mark.slow
def test_a_sharded_tensor_of_fsdp1_does_not_leave_and_the_remedy_works(kernel: Kernel):
    wrapped = (
        "import torch, torch.nn as nn\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n"
        "model = FSDP(nn.Linear(3, 4), device_id=torch.device('cpu'))\n"
        "FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)\n"
    )
    refused = error(kernel, f"%%distributed -n 2 --out sd --ui none\n{wrapped}sd = model.state_dict()")
    assert "one rank's part of a sharded tensor" in refused
    assert "get_model_state_dict(model" in refused


@pytest.mark.slow
def test_parts_in_a_session(kernel: Kernel):
    kernel.check("import sgpu_magic\nsession = sgpu_magic.connect(2, 'cpu', ui='none')")
    try:
        kernel.check(
            "%%distributed --ui none\n"
            "import torch\n"
            "from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard\n"
            "part = distribute_tensor(torch.arange(3.0), init_device_mesh('cpu', (2,)), [Shard(0)])"
        )
        assert kernel.value("session.gather('part').tolist()") == [0.0, 1.0, 2.0]
        kernel.check("parts = session['part']; one = session.pull('part')")
        assert "can't go to the ranks" in error(kernel, "session.push(back=one)")
        kernel.check("session.push(back=one, ranks=0); session.push(back=parts[1], ranks=1)")
        assert kernel.value("session.run('back.full_tensor().tolist()', ui='none').values") == [[0.0, 1.0, 2.0]] * 2
        assert "an argument of f can't go" in error(kernel, "def f(x): return x\nsession.call(f, one)")
    finally:
        kernel.check("session.close()")
