"""Nodes that do not see the pool's files: what a run needs comes to each once, what it leaves goes to the pool."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from homes import Home
from many_agents import ManyAgents
from pool_client import PoolClient
from waiting import eventually

from sgpu_magic.wire.attachments import StoredPayload
from sgpu_magic.wire.base import FailureKind, RunState
from sgpu_magic.wire.events import Noted, PayloadReleased, Placed, RanksStarted, RunEnded
from sgpu_magic.wire.rank_events import OutputWritten

MB = 1 << 20
# what a pool reads besides blobs during a run
SPARE = 2 * MB


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    made = Home({"SGPU_RUN_FILES_BYTES": str(4 * MB), "SGPU_CPU_SLOTS": "2"})
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes(home: Home) -> Iterator[ManyAgents]:
    made = ManyAgents(home, far=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(home: Home, nodes: ManyAgents) -> Iterator[PoolClient]:
    made = PoolClient(home)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_stays_on_nodes(home: Home, client: PoolClient) -> Iterator[None]:
    yield
    eventually(lambda: not left_on_nodes(home), 10, lambda: f"left on nodes: {left_on_nodes(home)}")
    home.check_leaks()


def left_on_nodes(home: Home) -> list[str]:
    """What lies in the nodes' own directories besides their logs and the blobs that they keep."""
    # not glob, which fails on files that are removed meanwhile
    walked = os.walk(home.state / "nodes")
    found = (Path(directory) / name for directory, folders, files in walked for name in (*folders, *files))
    places = ((path, path.relative_to(home.state / "nodes").parts) for path in found)
    return [str(path) for path, parts in places if len(parts) > 2 and parts[1] not in ("logs", "blob-cache")]


def read_bytes(nodes: ManyAgents) -> int:
    """What the pool service has read from files so far."""
    words = Path(f"/proc/{nodes.process.pid}/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


def data(seed: int, megabytes: int) -> np.ndarray:
    return np.random.default_rng(seed).random(megabytes * MB // 8)


@pytest.mark.slow
def test_a_payload_comes_once_to_each_node(home: Home, nodes: ManyAgents, client: PoolClient):
    array = data(1, 24)
    body = "import os\nfloat(array.sum()), os.environ['GROUP_RANK']"
    before = read_bytes(nodes)
    run = client.begin(body, ranks=4, nodes=2, names={"array": array})
    source = run.run.submission[0].payload.source if run.run.submission is not None else None
    assert isinstance(source, StoredPayload)
    run.wait_for(RanksStarted)
    came = read_bytes(nodes) - before
    # four ranks on two nodes
    assert 2 * 24 * MB <= came < 2 * 24 * MB + SPARE
    total = float(array.sum())
    assert run.values == [(total, "0"), (total, "0"), (total, "1"), (total, "1")]
    run.wait_for(PayloadReleased)
    # the pool links its parts into the run's directory
    kept = home.run_dir(run.run_id) / "payload"
    eventually(kept.exists, 10, "the payload is not kept")
    parts = {int(path.name): path.stat() for path in kept.iterdir()}
    assert {begin: status.st_size for begin, status in parts.items()} == {
        part.offset: part.size for part in source.parts
    }
    assert all(status.st_nlink == 2 for status in parts.values()), "they take no room of their own"
    before = read_bytes(nodes)
    again = client.begin(body, ranks=4, nodes=2, names={"array": array})
    again.wait_for(RanksStarted)
    assert read_bytes(nodes) - before < SPARE, "nodes have it since the last run"
    again.ended()
    eventually((home.run_dir(again.run_id) / "payload").exists, 10)


def test_results_of_all_nodes_come_back(home: Home, client: PoolClient):
    run = client.begin("y = x + rank", ranks=4, nodes=2, names={"x": data(2, 3)}, out=["y:all"])
    for rank, values in enumerate(run.names()):
        np.testing.assert_array_equal(values["y"], data(2, 3) + rank)  # type: ignore[arg-type]
    directory = home.run_dir(run.run_id)
    assert {f"result-{rank}.bin" for rank in range(4)} <= set(os.listdir(directory))
    assert (directory / "result-3.bin").stat().st_mode & 0o777 == 0o600


WRITE = """
import pathlib
for number in range(30_000):
    print(rank, number, "x" * 50)
here = next(path.parent for path in pathlib.Path({nodes!r}).glob(f"*/runs/*/rank-{{rank}}.log"))
out = here / "out"
(out / "deep").mkdir(parents=True, exist_ok=True)
(out / "deep" / f"{{rank}}.txt").write_text(f"of {{rank}}")
if rank == 0:
    (out / "tool.sh").write_text("true")
    (out / "tool.sh").chmod(0o700)
    (out / "empty").touch()
    (out / "link").symlink_to("/etc/passwd")
    (out / "latest").symlink_to(out / "deep")
    (out / "folder").mkdir()
    (out / "large").write_bytes(bytes(5 << 20))
"""


@pytest.mark.slow
def test_all_that_ranks_print_and_write_goes_to_the_pool(home: Home, client: PoolClient):
    run = client.begin(WRITE.format(nodes=str(home.state / "nodes")), ranks=4, nodes=2)
    assert run.ended().state is RunState.SUCCEEDED, run.ended()
    directory = home.run_dir(run.run_id)
    for rank in range(4):
        expected = "".join(f"{rank} {number} {'x' * 50}\n" for number in range(30_000))
        assert (directory / f"rank-{rank}.log").read_text() == expected, "whole when the last word is said"
    left_out = run.wait_for(Noted).text
    assert "out/large" in left_out
    assert "run_files_bytes" in left_out
    assert "out/link (a link to /etc/passwd" in left_out
    eventually(lambda: not left_on_nodes(home), 10, lambda: f"left on nodes: {left_on_nodes(home)}")
    out = directory / "out"
    assert sorted(os.listdir(out)) == ["deep", "empty", "folder", "latest", "tool.sh"]
    assert os.readlink(out / "latest") == "deep"
    assert [(out / "deep" / f"{rank}.txt").read_text() for rank in range(4)] == [f"of {rank}" for rank in range(4)]
    assert (out / "tool.sh").stat().st_mode & 0o777 == 0o700
    assert (out / "empty").stat().st_size == 0
    assert json.loads((directory / "run.json").read_bytes())["state"] == "succeeded"


@pytest.mark.slow
def test_a_blob_that_is_gone_fails_the_run(home: Home, client: PoolClient):
    array = data(4, 2)
    run = client.begin("float(array.sum())", ranks=2, names={"array": array})
    source = run.run.submission[0].payload.source if run.run.submission is not None else None
    run.ended()
    assert isinstance(source, StoredPayload)
    digest = max(source.parts, key=lambda part: part.size).digest
    (stored,) = (home.state / "blobs").glob(f"*/{digest[:2]}/{digest[2:]}")
    for cached in (home.state / "nodes").glob(f"*/blob-cache/*/{digest}"):
        cached.unlink()
    # other bytes of the same size
    stored.write_bytes(bytes(stored.stat().st_size))
    ended = client.begin("float(array.sum())", ranks=2, names={"array": array}).ended()
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.INTERNAL
    assert "damaged in the transfer" in ended.failure.message
    stored.unlink()


def test_a_new_pool_service_gets_what_the_last_one_did_not(home: Home, nodes: ManyAgents, client: PoolClient):
    go = home.work / "go"
    body = f"""
import pathlib, time
print("begun", flush=True)
while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)
for number in range(20_000): print(number)
y = x + rank
"""
    run = client.begin(body, ranks=4, nodes=2, names={"x": data(5, 3)}, out=["y:all"], detach=True)
    run.wait_for(OutputWritten, 4)
    nodes.kill()
    go.touch()
    (there,) = (home.state / "nodes").glob("*/runs/*/rank-3.log")
    eventually(lambda: there.read_text().endswith("19999\n"), 10, "it does not go on while nobody is there")
    nodes.restart()
    assert run.ended().state is RunState.SUCCEEDED
    for rank, values in enumerate(run.names()):
        np.testing.assert_array_equal(values["y"], data(5, 3) + rank)  # type: ignore[arg-type]
    whole = "begun\n" + "".join(f"{number}\n" for number in range(20_000))
    for rank in range(4):
        assert (home.run_dir(run.run_id) / f"rank-{rank}.log").read_text() == whole


def test_devices_are_free_while_files_cross_the_network_and_also_for_the_next_service(
    home: Home, nodes: ManyAgents, client: PoolClient
):
    for node in (0, 1):
        nodes.order("slow", node)
    first = client.begin("print('first')\nx = rank", ranks=4, nodes=2, out=["x:all"], detach=True)
    go = home.work / "next"
    second = client.begin(
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n7",
        ranks=4,
        nodes=2,
        detach=True,
    )
    second.wait_for(RanksStarted)
    assert not any(isinstance(event, RunEnded) for event in first.events), "its results are not here"
    nodes.kill()
    nodes.restart()
    # both runs used these devices
    third = client.begin("8", ranks=4, nodes=2)
    assert first.ended().state is RunState.SUCCEEDED
    assert [values["x"] for values in first.names()] == [*range(4)]
    assert (home.run_dir(first.run_id) / "rank-3.log").read_text() == "first\n"
    go.touch()
    assert second.values == [7] * 4
    assert third.values == [8] * 4


def test_a_group_that_is_started_again_keeps_its_devices_while_files_of_the_first_come(home: Home, client: PoolClient):
    go = home.work / "second"
    body = f"""
import os, pathlib, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("first", flush=True)
    os._exit(3)
print("second")
while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)
"""
    run = client.begin(body, ranks=1, retries=1)
    run.wait_for(RanksStarted)
    queued = client.begin("1", ranks=4, nodes=2)
    run.wait_for(RanksStarted, 2)
    states = {each.run_id: each.state for each in client.pool.status().runs}
    assert states[queued.run_id] is RunState.QUEUED
    go.touch()
    assert run.ended().state is RunState.SUCCEEDED, run.ended()
    assert (home.run_dir(run.run_id) / "rank-0.log").read_text() == "first\nsecond\n"
    assert queued.values == [1] * 4


CHECKPOINTS = """
import os
import torch.distributed as dist
from sgpu_magic import runtime

mine = runtime.checkpoint_dir() / "deep" / f"{rank}.txt"
found = sorted(path.read_text() for path in runtime.checkpoint_dir().rglob("*.txt"))
if runtime.get_restart_count() < 2:
    mine.parent.mkdir(exist_ok=True)
    mine.write_text(f"of {rank} in attempt {runtime.get_restart_count()}")
    if rank == 3:
        latest = runtime.checkpoint_dir() / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to("deep")
        (runtime.checkpoint_dir() / "empty").mkdir(exist_ok=True)
    dist.barrier()
    os._exit(3)
found, os.readlink(runtime.checkpoint_dir() / "latest"), (runtime.checkpoint_dir() / "empty").is_dir()
"""


def test_the_next_attempt_finds_the_checkpoints_of_all_nodes(client: PoolClient):
    run = client.begin(CHECKPOINTS, ranks=4, nodes=2, retries=2)
    assert run.values == [([f"of {rank} in attempt 1" for rank in range(4)], "deep", True)] * 4


@pytest.mark.slow
def test_a_retry_says_what_was_lost_with_a_node(nodes: ManyAgents, client: PoolClient):
    body = """
import pathlib, time
from sgpu_magic import runtime
if runtime.get_restart_count() == 0:
    (runtime.checkpoint_dir() / "model").write_text("1")
    print("saved", flush=True)
    while True: time.sleep(0.01)
[path.name for path in runtime.checkpoint_dir().iterdir()]
"""
    run = client.begin(body, ranks=1, retries=1)
    run.wait_for(OutputWritten)
    (share,) = run.wait_for(Placed).lease.shares
    node = int(share.node[-1])
    nodes.order("lose", node)
    assert run.values == [[]]
    assert "The next attempt finds the checkpoints of earlier attempts" in run.wait_for(Noted).text
    nodes.order("bring", node)
    eventually(lambda: client.pool.status().cpu_slots_free == 4, 10, "the node is not used again")


@pytest.mark.slow
def test_files_that_are_lost_with_their_node_after_the_end_are_named(home: Home, nodes: ManyAgents, client: PoolClient):
    for node in (0, 1):
        nodes.order("slow", node)
    body = f"""
import pathlib
while not (found := [*pathlib.Path({str(home.state / "nodes")!r}).glob("*/runs/*/run.json")]):
    pass  # the agent writes it while the cell begins
here = found[0].parent
(here / "out").write_text("left")
raise ValueError(str(here))
"""
    run = client.begin(body, ranks=1)
    failure = run.ended().failure
    assert failure is not None
    node = 0 if "node-0" in failure.message else 1
    nodes.order("lose", node)
    text = (
        f"the node node-{node} was lost: the test gave it up; the run's files that had not reached the pool yet are "
        "lost"
    )
    assert run.wait_for(Noted).text == text
    for each in (0, 1):
        nodes.order("quick", each)
    nodes.order("bring", node)
    eventually(lambda: client.pool.status().cpu_slots_free == 4, 10, "the node is not used again")
