"""What every engine must do with a run of four ranks, whether they are on one node or on several."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import cast

import pytest
from contract_engines import PoolUnderTest
from waiting import eventually

from sgpu_magic.errors import SgpuError
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import AttemptFailed, Event, RanksStarted, RunEnded
from sgpu_magic.wire.rank_events import OutputWritten, RankFailed

RANKS = 4
BARRIER = "import torch.distributed as dist\ndist.barrier()"


def events_on_disk(pool: PoolUnderTest, run_id: str) -> list[Event]:
    return [event for event, _ in EventFile(pool.home.run_dir(run_id)).new_events()]


# ---------------------------------------------------------------- ranks


def test_all_ranks_are_one_group(pool: PoolUnderTest):
    run = pool.client.begin(
        "import torch, torch.distributed as dist\n"
        "total = torch.tensor([rank + 1.0])\n"
        "dist.all_reduce(total)\n"
        "(rank, world_size, total.item(), dist.get_rank())",
        ranks=RANKS,
    )
    assert run.values == [(rank, RANKS, 10.0, rank) for rank in range(RANKS)]


def test_torchruns_variables_are_those_of_torchrun_on_as_many_nodes(pool: PoolUnderTest):
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_RANK"]
    run = pool.client.begin(f"import os\n[int(os.environ[name]) for name in {names}]", ranks=RANKS)
    nodes = pool.service.nodes
    here = RANKS // nodes
    assert run.values == [[rank, rank % here, rank // here, RANKS, here, nodes, rank] for rank in range(RANKS)]


def test_the_group_can_be_made_anew_over_master_addr_and_port(pool: PoolUnderTest):
    """As frameworks do that make their own."""
    run = pool.client.begin(
        "import os, torch, torch.distributed as dist\n"
        "sums = []\n"
        "for again in range(2):\n"
        "    dist.destroy_process_group()\n"
        "    dist.init_process_group('gloo')\n"
        "    one = torch.ones(1)\n"
        "    dist.all_reduce(one)\n"
        "    sums.append(one.item())\n"
        "sums",
        ranks=RANKS,
    )
    assert run.values == [[RANKS, RANKS]] * RANKS


def test_a_rank_that_is_done_early_does_not_fail_its_peers(pool: PoolUnderTest):
    for _ in range(5):
        run = pool.client.begin("1 + 1", ranks=RANKS)
        assert run.ended().state is RunState.SUCCEEDED


# ---------------------------------------------------------------- output and results


def test_output_is_whole_and_in_order_by_rank(pool: PoolUnderTest):
    run = pool.client.begin("for number in range(500):\n    print(f'{rank}: {number}')", ranks=RANKS)
    assert run.ended().state is RunState.SUCCEEDED
    assert run.printed == {rank: "".join(f"{rank}: {number}\n" for number in range(500)) for rank in range(RANKS)}


def test_results_of_all_ranks_come_back_in_order_small_and_large(pool: PoolUnderTest):
    run = pool.client.begin("mine = bytes([rank]) * (1000 if rank % 2 else 3_000_000)", ranks=RANKS, out=["mine:all"])
    found = [bytes(cast("bytes", names["mine"])) for names in run.names()]
    assert [(len(mine), mine[:1]) for mine in found] == [
        (1000 if rank % 2 else 3_000_000, bytes([rank])) for rank in range(RANKS)
    ]


def test_what_was_captured_is_on_every_rank(pool: PoolUnderTest):
    large = os.urandom(2_000_000)
    run = pool.client.begin(
        "(hash(large) == hash(bytes(large)), len(large), step)", ranks=RANKS, names={"large": large, "step": 7}
    )
    assert run.values == [(True, 2_000_000, 7)] * RANKS


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("culprit", [0, RANKS - 1])
def test_the_rank_that_failed_is_shown_and_the_others_are_freed(pool: PoolUnderTest, culprit: int):
    began = time.monotonic()
    run = pool.client.begin(
        f"import torch.distributed as dist\nif rank == {culprit}:\n    raise ValueError('no data')\ndist.barrier()",
        ranks=RANKS,
    )
    ended = run.ended()
    assert ended.state is RunState.FAILED
    failure = ended.failure
    assert failure is not None
    assert (failure.rank, failure.kind, failure.line) == (culprit, FailureKind.USER_CODE, 3)
    assert failure.message == "ValueError: no data" or "no data" in failure.message
    assert failure.exception is not None
    assert all(other.is_consequence or other.at >= failure.at for other in ended.others)
    assert {event.failure.rank for event in run.events if isinstance(event, RankFailed)} >= {culprit}
    assert time.monotonic() - began < 10


def test_a_failure_while_the_others_compute_ends_them(pool: PoolUnderTest):
    run = pool.client.begin("import time\nif rank == 3:\n    1 / 0\ntime.sleep(600)", ranks=RANKS)
    failure = run.ended().failure
    assert failure is not None
    assert (failure.rank, failure.type_name) == (3, "builtins.ZeroDivisionError")


def test_a_rank_that_is_killed_is_named(pool: PoolUnderTest):
    run = pool.client.begin(
        f"import os, signal\nif rank == 3:\n    os.kill(os.getpid(), signal.SIGKILL)\n{BARRIER}", ranks=RANKS
    )
    failure = run.ended().failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.exit_status) == (FailureKind.WORKER_DIED, 3, -signal.SIGKILL)
    assert failure.message.startswith("rank 3 of 4")


# ---------------------------------------------------------------- the stop path


def test_a_run_that_hangs_is_cancelled(pool: PoolUnderTest):
    run = pool.client.begin(
        "if rank:\n    import torch.distributed as dist\n    dist.barrier()\n"
        "import threading\nthreading.Event().wait()",
        ranks=RANKS,
    )
    run.wait_for(RanksStarted)
    run.run.cancel("the test")
    ended = run.ended()
    assert (ended.state, ended.reason) == (RunState.CANCELLED, "the test")
    assert ended.failure is None


def test_a_time_out_shows_where_every_rank_was(pool: PoolUnderTest):
    run = pool.client.begin(
        f"{BARRIER}\nif rank != 2:\n    import threading; threading.Event().wait()\ndist.barrier()",
        ranks=RANKS,
        timeout_s=4.0,
    )
    ended = run.ended()
    assert ended.state is RunState.TIMED_OUT
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.TIMEOUT
    assert [stack.rank for stack in ended.stacks] == list(range(RANKS))
    lines = [next((frame.line for frame in stack.frames if frame.function == "<module>"), 0) for stack in ended.stacks]
    assert lines == [4, 4, 5, 4], ended.stacks


def test_stacks_are_those_of_all_ranks(pool: PoolUnderTest):
    run = pool.client.begin("import threading\nthreading.Event().wait()", ranks=RANKS)
    run.wait_for(RanksStarted)

    def all_wait() -> bool:
        stacks = pool.client.pool.stacks(run.run_id).stacks
        return [stack.rank for stack in stacks] == list(range(RANKS)) and all(stack.frames for stack in stacks)

    eventually(all_wait, 10, "some rank has no stack")
    run.run.cancel("the test")
    assert run.ended().state is RunState.CANCELLED


# ---------------------------------------------------------------- again


def test_a_group_whose_worker_died_is_started_again(pool: PoolUnderTest, tmp_path: Path):
    run = pool.client.begin(
        "import os, pathlib, signal\n"
        f"once = pathlib.Path({str(tmp_path / 'once')!r})\n"
        "if rank == 3 and not once.exists():\n"
        "    once.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{BARRIER}\nos.environ['TORCHELASTIC_RESTART_COUNT']",
        ranks=RANKS,
        retries=1,
    )
    assert run.values == ["1"] * RANKS
    (failed,) = [event for event in run.events if isinstance(event, AttemptFailed)]
    assert (failed.failure.kind, failed.failure.rank) == (FailureKind.WORKER_DIED, 3)


def test_a_run_outlives_its_service(pool: PoolUnderTest, tmp_path: Path):
    go = tmp_path / "go"
    run = pool.client.begin(
        "import os, time\n"
        "print('before', flush=True)\n"
        f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\n"
        f"{BARRIER}\nprint('after')\nrank * 2",
        ranks=RANKS,
    )
    run.wait_for(OutputWritten, RANKS)
    pool.service.kill()
    go.touch()
    pool.service.restart()
    assert run.values == [0, 2, 4, 6]
    assert run.printed == dict.fromkeys(range(RANKS), "before\nafter\n")
    kept = events_on_disk(pool, run.run_id)
    assert [event.seq for event in kept] == list(range(1, len(kept) + 1))
    assert len([event for event in kept if isinstance(event.body, RanksStarted)]) == 1
    assert len([event for event in kept if isinstance(event.body, RunEnded)]) == 1


def test_a_run_that_ends_while_there_is_no_service_is_told_by_the_next(pool: PoolUnderTest, tmp_path: Path):
    done = tmp_path / "done"
    go = tmp_path / "go"
    run = pool.client.begin(
        "import os, pathlib, time\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\n"
        f"{BARRIER}\npathlib.Path({str(done)!r} + str(rank)).touch()\n"
        "if rank == 2:\n    raise KeyError('late')",
        ranks=RANKS,
    )
    run.wait_for(OutputWritten, RANKS)
    pool.service.kill()
    go.touch()
    eventually(lambda: all(Path(f"{done}{rank}").exists() for rank in range(RANKS)), 10, "the ranks do not go on")
    pool.service.restart()
    ended = run.ended()
    assert ended.state is RunState.FAILED
    assert ended.failure is not None
    assert (ended.failure.rank, ended.failure.type_name) == (2, "builtins.KeyError")


def test_what_can_not_be_placed_is_refused(pool: PoolUnderTest):
    with pytest.raises(SgpuError, match="H100"):
        pool.client.begin("pass", ranks=2, device_type="h100")
