"""Renewed process groups: models and groups train on after ranks failed while others waited in collectives."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from ranks import Session, Zygote
from waiting import eventually

from sgpu_magic.wire.rank import AskCollectives, Collectives, Finished, Renew, Renewed
from sgpu_magic.wire.rank_events import Collective

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files, /proc")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def session(zygote: Zygote) -> Iterator[Session]:
    made = Session(zygote, 3)
    yield made.connect()
    made.leave()


def values(session: Session, body: str, **options: object) -> list[object]:
    return [found["value"] for found in session.run(body, **options)]


def break_off(session: Session, body: str, culprit: int = 1) -> list[str]:
    """Execute a cell in which one rank fails and the others wait for it; return the messages of the others."""
    session.execute(body)
    assert session.failure(culprit).failure.message == "broken off"
    others = [rank for rank in range(session.size) if rank != culprit]
    for rank in others:
        eventually(lambda rank=rank: waits(session, rank), 10, f"rank {rank} does not wait")
    session.release()
    failures = [session.failure(rank, deadline_s=5).failure for rank in others]
    assert all(failure.is_consequence for failure in failures), failures
    assert all(failure.memory is not None for failure in failures)
    return [failure.message for failure in failures]


def waits(session: Session, rank: int) -> bool:
    """The rank has reached its last line, and its main thread sleeps there: in a collective, or in the store."""
    return "MARK" in session.ranks[rank].printed.rpartition("BEGIN")[2] and is_asleep(session.ranks[rank].pid)


def is_asleep(pid: int) -> bool:
    with open(f"/proc/{pid}/task/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


SETUP = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

class Marked(torch.autograd.Function):
    'Fails in the backward pass where it is asked to.'
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if fail_in_backward:
            raise ValueError('broken off')
        return gradient

class Mark(nn.Module):
    def forward(self, x):
        return Marked.apply(x)

fail_in_backward = False
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(4, 4), Mark(), nn.Linear(4, 1)))
opt = torch.optim.SGD(model.parameters(), 1e-3)
pair = dist.new_group([0, 2])
mesh = init_device_mesh('cpu', (3,))
sharded = nn.Sequential(nn.Linear(4, 4), Mark(), nn.Linear(4, 3))
for layer in (sharded[0], sharded[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
sharded_opt = torch.optim.SGD(sharded.parameters(), 1e-3)
batch = torch.ones(2, 4) * (rank + 1)

def step():
    opt.zero_grad()
    sharded_opt.zero_grad()
    loss = model(batch).pow(2).sum()
    loss.backward()
    opt.step()
    sharded(batch).pow(2).sum().backward()
    sharded_opt.step()
    return loss.item()

def check():
    'Everything works, and the replicas are alike.'
    step()
    total = torch.ones(1)
    if rank != 1:
        dist.all_reduce(total, group=pair)
    parts = [torch.zeros(4, 4) for _ in range(3)]
    dist.all_gather(parts, model.module[0].weight.detach())
    whole = sharded[0].weight.full_tensor()
    dist.all_gather_object(everybody := [None] * 3, whole.tolist())
    return total.item(), all(torch.equal(parts[0], part) for part in parts), everybody[0] == everybody[2]

def mark():
    print('BEGIN')
    if rank == 1:
        raise ValueError('broken off')
    print('MARK', flush=True)
"""
SUM = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
GOOD = [(2.0, True, True), (1.0, True, True), (2.0, True, True)]

WAYS_TO_BREAK = {
    "in a collective": "mark()\ndist.all_reduce(torch.ones(1))",
    "in a subgroup": "mark()\ndist.all_reduce(torch.ones(1), group=dist.group.WORLD if rank else pair)",
    "between forward and backward": "loss = model(batch).sum()\nmark()\nloss.backward()",
    "in FSDP's forward": "mark()\nsharded(batch)",
    "in FSDP's backward": "loss = sharded(batch).sum()\nmark()\nloss.backward()",
    "while a group is made": "mark()\ndist.new_group([0, 1, 2])",
    "in a barrier": "mark()\ndist.barrier()",
}


@pytest.mark.slow
def test_models_and_groups_train_on_over_renewals(session: Session):
    session.run(SETUP)
    assert values(session, "check()") == GOOD
    for body in WAYS_TO_BREAK.values():
        break_off(session, body)
        assert session.renew() == [None, None, None]
        assert values(session, "check()") == GOOD, body
    # group numbers agree again, and new groups can be created
    made = "late = dist.new_group([1, 2])\nt = torch.ones(1)\nif rank: dist.all_reduce(t, group=late)\nt.item()"
    assert values(session, made) == [1.0, 2.0, 2.0]
    assert session.renew() == [None, None, None]
    assert values(session, made.partition("\n")[2]) == [1.0, 2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["model", "sharded"])
def test_a_backward_pass_that_fails_half_way_leaves_the_models_usable(session: Session, wrapped: str):
    session.run(SETUP)
    session.run("step()")
    session.execute(
        "print('BEGIN')\nfail_in_backward = rank == 1\nprint('MARK', flush=True)\n"
        f"{wrapped}(batch).pow(2).sum().backward()"
    )
    assert session.failure(1).failure.message == "broken off"
    for rank in (0, 2):
        eventually(lambda rank=rank: waits(session, rank), 10, f"rank {rank} does not wait")
    session.release()
    session.failure(0)
    session.failure(2)
    session.renew()
    assert values(session, "fail_in_backward = False\ncheck()") == GOOD


@pytest.mark.slow
def test_who_waits_for_a_peer_in_a_new_group_is_told_so(session: Session):
    session.run(SETUP)
    messages = break_off(session, WAYS_TO_BREAK["while a group is made"])
    assert messages == ["released while it waited for a peer that did not join"] * 2


@pytest.mark.slow
def test_a_replaced_rank_joins_and_the_others_keep_their_names(session: Session):
    session.run(SETUP + "\nseen = 'kept'\nstep()")
    session.ranks[1].kill()
    session.release()
    session.renew([1])
    assert values(session, "globals().get('seen')") == ["kept", None, "kept"]
    assert (
        values(session, "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()")
        == [3.0] * 3
    )
    # all ranks create everything again, with the same numbers
    session.run(SETUP)
    assert values(session, "check()") == GOOD
    assert session.renew() == [None, None, None]
    assert values(session, "check()") == GOOD


def test_groups_with_a_replaced_rank_are_lost_and_others_go_on(session: Session):
    session.run(
        "import torch, torch.distributed as dist\nwith_it = dist.new_group([0, 1])\nwithout = dist.new_group([0, 2])"
    )
    session.ranks[1].kill()
    session.release()
    assert (
        session.renew([1])
        == ["The process groups of ranks (0, 1) can't continue, as rank 1 is a new process: create them again."] * 2
    )
    code = "t = torch.ones(1)\ndist.all_reduce(t, group=without)\nt.item()"
    assert values(session, code, only=[0, 2]) == [2.0, 2.0]


def test_all_ranks_may_be_replaced(session: Session):
    for rank in session.ranks:
        rank.kill()
    session.renew([0, 1, 2])
    assert values(session, SUM) == [3.0] * 3


@pytest.mark.parametrize("who", ["True", "rank == 0"])
def test_a_group_that_a_cell_destroyed_is_made_anew(session: Session, who: str):
    session.execute(f"import torch, torch.distributed as dist\nif {who}: dist.destroy_process_group()")
    for rank in session.ranks:
        rank.expect(Finished)
    session.renew()
    code = "t = torch.ones(1)\ndist.all_reduce(t)\ng = dist.new_group([0, 1, 2])\ndist.all_reduce(t, group=g)\nt.item()"
    assert values(session, code) == [9.0] * 3


def test_collectives_keep_sane_numbers_over_renewals(session: Session):
    def current(rank: int) -> Collective | None:
        session.ranks[rank].send(AskCollectives(request=1))
        return session.ranks[rank].expect(Collectives).current

    session.run("import torch, torch.distributed as dist\nfor _ in range(3): dist.all_reduce(torch.ones(1))")
    # torch records the end of a collective in a separate thread, after the call has returned
    third = Collective(name="all_reduce", seq=3, pending=False)
    eventually(lambda: {current(rank) for rank in range(3)} == {third}, 5, "the third is not over on every rank")
    break_off(
        session,
        "print('BEGIN')\nif rank == 1: raise ValueError('broken off')\nprint('MARK', flush=True)\n"
        "dist.all_reduce(torch.ones(1))",
    )
    session.renew()
    # the old collective never ends, and is not the current one
    assert [current(rank) for rank in range(3)] == [None] * 3
    session.run("dist.barrier()\ndist.all_reduce(torch.ones(1))")
    over = Collective(name="all_reduce", seq=2, pending=False)
    eventually(lambda: {current(rank) for rank in range(3)} == {over}, 5, "it is not over on every rank")
    session.execute("if rank: dist.all_reduce(torch.ones(1))", only=[1, 2])
    for rank in (1, 2):
        eventually(
            lambda rank=rank: current(rank) == Collective(name="all_reduce", seq=3, pending=True), 5, "it is not in it"
        )
    session.run("dist.all_reduce(torch.ones(1))", only=[0])
    for rank in (1, 2):
        session.result(rank)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["at once", "before it has begun"])
def test_a_renewal_whose_peer_does_not_come_can_be_released(session: Session, busy: bool):
    if busy:
        session.execute("import time\ntime.sleep(0.5)", only=[0, 2])
    store = os.memfd_create("store")
    for rank in (0, 2):
        session.ranks[rank].send(Renew(), (), [store])
    os.close(store)
    session.release()
    for rank in (0, 2):
        if busy:
            session.result(rank)
        answer = session.ranks[rank].expect(Renewed, deadline_s=5)
        assert answer.problem.startswith(f"rank {rank}: ")
    session.renew()
    assert values(session, SUM) == [3.0] * 3


# ---------------------------------------------------------------- groups that are lost

MESH = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
def build():
    global mesh, group, model
    # a mesh of all ranks that torch makes itself has the default group, which is never lost
    mesh = DeviceMesh.from_group(dist.new_group([0, 1, 2]), 'cpu', mesh_dim_names=('dp',))
    group = dist.new_group([0, 1, 2])
    model = DDP(torch.nn.Linear(2, 1), process_group=group)
def total():
    # computed with the mesh that DTensor has for such a tensor, also from its caches
    doubled = distribute_tensor(torch.arange(6.), mesh, [Shard(0)]) * 2
    return doubled.full_tensor().sum().item()
"""
USES = {
    "a collective": "dist.all_reduce(torch.ones(1), group=group)",
    "a mesh": "dist.barrier(mesh.get_group())",
    "a sharded tensor": "total()",
    "a model": "model(torch.ones(1, 2))",
}


def replace_rank_1(session: Session) -> None:
    session.ranks[1].kill()
    session.release()
    session.renew([1])


@pytest.mark.slow
def test_what_a_lost_group_was_used_by_says_so_and_can_be_made_again(session: Session):
    session.run(MESH + "build()\ntotal()")
    replace_rank_1(session)
    for use in USES.values():
        session.execute(use, only=[0, 2])
        for rank in (0, 2):
            failure = session.failure(rank).failure
            assert failure.message == (
                "the process group of ranks (0, 1, 2) was lost: rank 1 is a new process. Create it again."
            ), use
            assert "lost_groups" not in failure.traceback_text, use
    assert values(session, MESH + "build()\nloss = model(torch.ones(1, 2)).sum().backward()\ntotal()") == [30.0] * 3


def test_ranks_name_their_next_groups_alike_after_a_restart(session: Session):
    """Also groups that only their members create, and a group over `MASTER_ADDR`."""
    names = "import torch.distributed as dist\nimport torch.distributed.distributed_c10d as c10d\n"
    local = "g = dist.new_group([0, 1, 2], use_local_synchronization=True)\ndist.barrier(g)\n"
    again = "dist.destroy_process_group()\ndist.init_process_group('gloo')\ndist.barrier()\n"
    session.run(names + again + "some = [dist.new_group([0, 1, 2]) for _ in range(3)]\n" + local)
    # torch itself would give the next common group a different name on this rank
    session.run("alone = dist.new_group([0], use_local_synchronization=True)", only=[0])
    replace_rank_1(session)
    assert values(session, names + "len(c10d._world.pg_names), c10d._world.group_count")[1] == (1, 4)
    for _ in range(2):
        found = values(
            session, names + local + "h = dist.new_group([0, 1, 2])\nmore = [g.group_name, h.group_name]\nmore"
        )
        assert found[0] == found[1] == found[2]
    values(session, names + again)


def test_names_of_local_groups_are_alike_where_ranks_have_other_groups(session: Session):
    code = (
        "import torch.distributed as dist\n"
        "if rank == 0: mine = dist.new_group([0], use_local_synchronization=True)\n"
        "ours = [dist.new_group([0, 1, 2], use_local_synchronization=True) for _ in range(2)]\n"
        "for group in ours: dist.barrier(group)\n"
        "[group.group_name for group in ours]"
    )
    found = values(session, code)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 2  # type: ignore[arg-type]


def test_a_new_process_has_the_time_limit_of_the_group_that_it_joins(session: Session):
    limit = (
        "import datetime, torch, torch.distributed as dist\n"
        "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()"
    )
    session.run(
        "import datetime, torch.distributed as dist\ndist.init_process_group(timeout=datetime.timedelta(seconds=77))"
    )
    replace_rank_1(session)
    assert values(session, limit) == [77.0] * 3


@pytest.mark.slow
def test_a_group_is_reconnected_as_often_as_torch_can_count_for_each(session: Session):
    """Backend types that torch can distinguish are counted per group, not for all groups together."""
    session.run("import torch, torch.distributed as dist\nmany = [dist.new_group([0, 1, 2]) for _ in range(60)]")
    for _ in range(5):
        assert session.renew() == [None, None, None]
    code = "t = torch.ones(1) * rank\nfor group in many: dist.all_reduce(t, dist.ReduceOp.MAX, group)\nt.item()"
    assert values(session, code) == [2.0] * 3
