"""Lifetimes of the pool and its processes, and what is left when one is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernels import Cell, Home, Kernel, eventually, is_alive, stop_process, wait_gone
from process_table import watched_pids
from strikes import command, events_of, ranks_of, send
from time_limits import GRACE_S

from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.system.processes import process_start
from sgpu_magic.wire.base import RunState
from sgpu_magic.wire.events import RanksStarted, RunEnded, StateChanged

# promise 4: nothing outlives its owner
GONE_S = 5.0
# how long a node's agent waits for the next pool service
ADOPT_S = 3.0
HOME_VARIABLES = {"SGPU_ADOPT_TIMEOUT_S": str(ADOPT_S)}

SLEEP = "import time\nprint('begun', flush=True)\ntime.sleep(600)"
BARRIER = (
    "import time, torch.distributed as dist\nprint('begun', flush=True)\n"
    "time.sleep(600) if rank == 0 else dist.barrier()"
)
WORK = {"sleep": SLEEP, "barrier": BARRIER}
# continues until the file `go` exists
UNTIL_GO = """\
import os, pathlib, time
import torch.distributed as dist
count = 0
while rank == 0 and not pathlib.Path("go").exists():
    print("line", count, flush=True)
    count += 1
    time.sleep(0.02)
dist.barrier()
print("done", count)
os.getpid()"""


@pytest.fixture(autouse=True)
def stranger() -> Iterator[int]:
    """An unrelated process, which must outlive every test."""
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as process:
        yield process.pid
        survived = process.poll() is None
        process.kill()
    assert survived, "a process that is not ours was ended"


def begun(kernel: Kernel, work: str, ranks: int = 3) -> Cell:
    """Start a long run and wait until all its ranks are in their cells."""
    cell = kernel.start(f"%%distributed -n {ranks}\n{WORK[work]}")
    for rank in range(ranks):
        cell.until_shown(f"[{rank}] begun", 20)
    return cell


def victims(home: Home, which: str) -> list[int]:
    """Pids of the pool, the agent, the zygotes, one rank or one standby rank."""
    processes = home.processes()
    ranks = [pid for pid in home.rank_pids() if pid in processes and "zygote" in processes[pid].command]
    found = {
        "pool": [home.pool_pid()],
        "agent": home.agent_pids(),
        "zygote": home.zygote_pids(),
        # an orphan of a rank has the same parent, but another command
        "rank": ranks[-1:],
        "standby": home.standby_pids()[-1:],
    }[which]
    assert found, which
    assert None not in found, which
    return [pid for pid in found if pid is not None]


def kill(*pids: int) -> None:
    for pid in pids[:1]:
        os.kill(pid, signal.SIGKILL)
    for pid in pids[1:]:
        # an agent's death may have ended its zygote by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def all_gone(pids: set[int], deadline_s: float = GONE_S) -> None:
    eventually(
        lambda: not any(map(is_alive, pids)),
        deadline_s,
        lambda: f"still there: {[pid for pid in pids if is_alive(pid)]}",
    )


def others(home: Home) -> set[int]:
    """Everything of this home but its kernels."""
    return set(home.processes()) - home.kernel_pids


def standby_ready(home: Home, ranks: int) -> None:
    """Wait until a standby group is there and the agent watches each of its processes."""

    def is_watched() -> bool:
        # ranks of the run before may still be watched
        watched = {pid for agent in home.agent_pids() for pid in watched_pids(agent)}
        standby = home.standby_pids()
        return len(standby) == ranks and watched == set(standby)

    eventually(is_watched, 15, "no standby group")


def runs_again(kernel: Kernel) -> None:
    reply = kernel.check("%%distributed -n 2 --out word\nword = f'fine {world_size}'")
    assert "Error" not in reply.text
    assert kernel.value("word") == "fine 2"


# ---------------------------------------------------------------- killed while a run goes on


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sleep", "barrier"])
@pytest.mark.parametrize(
    ("which", "error", "says"),
    [
        ("agent", "NodeLost", "the agent on this machine ended unexpectedly"),
        ("zygote", "WorkerDied", "the process that forks ranks ended unexpectedly"),
        ("rank", "WorkerDied", "SIGKILL"),
    ],
)
def test_a_kill_while_a_run_goes_on(kernel: Kernel, home: Home, which: str, error: str, says: str, work: str):
    cell = begun(kernel, work)
    pid = victims(home, which)[0]
    doomed = others(home) - {home.pool_pid()} if which == "agent" else set(home.rank_pids())
    pool = home.pool_pid()
    kill(pid)
    at = time.monotonic()
    reply = cell.wait(10)
    assert time.monotonic() - at < GRACE_S, "the notebook waits"
    assert reply.status == "error", reply.story
    assert says in reply.evalue, reply.story
    assert reply.ename == error, reply.story
    all_gone(doomed | {pid})
    runs_again(kernel)
    assert home.pool_pid() == pool, "the pool service has to outlive its agent"


@pytest.mark.slow
def test_a_run_whose_agent_dies_when_its_time_is_over_has_timed_out(kernel: Kernel, home: Home):
    cell = kernel.start(f"%%distributed -n 2 --timeout 2 --name slow\n{SLEEP}")
    cell.until_shown("[1] begun")
    run_id = home.run_named("slow")
    assert run_id is not None
    (agent,) = home.agent_pids()
    # it gets the order at the time limit, but can't act on it
    os.kill(agent, signal.SIGSTOP)

    def is_over() -> bool:
        moves = [body.state for body in events_of(home, run_id) if isinstance(body, StateChanged)]
        return RunState.CANCELLING in moves

    eventually(is_over, 15, "its time is over")
    os.kill(agent, signal.SIGKILL)
    reply = cell.wait(15)
    assert reply.ename == "RunTimeout", reply.story
    assert "agent on this machine ended unexpectedly" in reply.text, reply.story
    row = eventually(lambda: home.ledger()[run_id].state == "timed out" and home.ledger()[run_id], 5, "its end is kept")
    assert row.state == "timed out"
    assert kernel.check("%%distributed -n 2\nprint('next')").lines(1) == ["next"]


@pytest.mark.slow
def test_agents_that_are_killed_at_work_are_replaced_each_time(kernel: Kernel, home: Home):
    """Only one that never gets a run to start is given up."""
    for _ in range(4):
        cell = begun(kernel, next(iter(WORK)))
        kill(*victims(home, "agent"))
        reply = cell.wait(10)
        assert reply.evalue.count("the agent on this machine ended unexpectedly") == 1, reply.story
        assert "in a row" not in reply.evalue
    runs_again(kernel)


def until_go(kernel: Kernel, ranks: int = 3, options: str = "", before: str = "") -> Cell:
    """Start a run that goes on until there is a file `go`, and wait until it prints."""
    cell = kernel.start(f"%%distributed -n {ranks} {options}\n{before}\n{UNTIL_GO}")
    cell.until_shown("[0] line 3", 20)
    return cell


@pytest.fixture
def go_file(home: Home) -> Iterator[Path]:
    file = home.work / "go"
    file.unlink(missing_ok=True)
    yield file
    file.unlink(missing_ok=True)


def is_whole(lines: list[str]) -> bool:
    count = len(lines) - 1
    return lines == [*(f"line {number}" for number in range(count)), f"done {count}"]


def test_a_run_outlives_its_killed_pool_and_the_next_one_too(kernel: Kernel, home: Home, go_file: Path):
    """Promise 4: its ranks go on, the next pool service takes them over, and the cell loses nothing."""
    kernel.check("import numpy as np\ndata = np.ones(300_000)")
    cell = until_go(kernel, options="--out weight", before="weight = float(data.sum())")
    ranks, pools = set(home.rank_pids()), {home.pool_pid()}
    for _ in range(2):
        shown = len(cell.reply.lines(0))
        kill(*victims(home, "pool"))
        # the next service runs, and has forwarded the output from the meantime
        cell.until(lambda: home.pool_pid() not in pools | {None}, 10, "the next pool")
        cell.until(lambda shown=shown: len(cell.reply.lines(0)) > shown + 5, 10, "further output")
        pools.add(home.pool_pid())
    go_file.touch()
    reply = cell.wait(10)
    assert reply.status == "ok", reply.story
    assert is_whole(reply.lines(0)), reply.story
    assert set(kernel.value("_.values")) == ranks
    assert kernel.value("weight") == 300_000
    assert len(pools) == 3
    assert "taken over the run" in reply.text
    runs_again(kernel)


@pytest.mark.slow
def test_a_run_whose_notebook_does_not_come_back_ends(home: Home, new_kernel: Callable[..., Kernel], go_file: Path):
    """The notebook lives but can't start another pool service: everything ends when the time is over."""
    kernel = new_kernel()
    cell = until_go(kernel)
    doomed, run_id = others(home), newest(home)
    os.kill(kernel.pid, signal.SIGSTOP)
    try:
        (pool,) = victims(home, "pool")
        kill(pool)
        at = time.monotonic()
        all_gone(doomed, ADOPT_S + GONE_S)
        assert time.monotonic() - at > ADOPT_S - 0.5, "the agent does not wait"
    finally:
        os.kill(kernel.pid, signal.SIGCONT)
    reply = cell.wait(15)
    assert (reply.status, reply.ename) == ("error", "NodeLost"), reply.story
    assert "the pool service and the agent of its ranks ended unexpectedly" in reply.evalue, reply.story
    assert home.ledger()[run_id][0] == "failed"
    runs_again(kernel)


@pytest.mark.parametrize("comes", ["at once", pytest.param("when a pool is there again", marks=pytest.mark.slow)])
def test_a_detached_run_outlives_notebook_and_pool(
    home: Home, new_kernel: Callable[..., Kernel], go_file: Path, comes: str
):
    """Its agent starts the next pool service if no client does."""
    first = new_kernel()
    first.check(f"%%distributed -n 3 --detach\n{UNTIL_GO}")
    run_id = newest(home)
    eventually(lambda: "line 3" in home.log(run_id, 0), 10)
    ranks, pool = set(home.rank_pids()), home.pool_pid()
    kill(*victims(home, "pool"))
    first.kill()
    if comes != "at once":
        eventually(lambda: home.pool_pid() not in (None, pool), ADOPT_S + GONE_S, "the next pool")
    second = new_kernel()
    cell = second.start(f"%sgpu_attach {run_id}")
    cell.until_shown("taken over the run", 15)
    go_file.touch()
    reply = cell.wait(15)
    assert reply.status == "ok", reply.story
    assert is_whole(reply.lines(0)), reply.story
    assert set(second.value("_.values")) == ranks
    eventually(lambda: home.ledger()[run_id].state == "succeeded", 10, "the ledger's last word")
    runs_again(second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("together", "says"),
    [
        (("pool", "agent"), "the pool service and the agent of its ranks ended unexpectedly"),
        (("agent", "zygote"), "the agent on this machine ended unexpectedly"),
        (("pool", "agent", "zygote"), "the pool service and the agent of its ranks ended unexpectedly"),
    ],
)
def test_several_killed_at_once(kernel: Kernel, home: Home, together: tuple[str, ...], says: str):
    cell = begun(kernel, "barrier")
    doomed = others(home) - ({home.pool_pid()} if "pool" not in together else set())
    kill(*(victims(home, which)[0] for which in together))
    reply = cell.wait(10)
    assert (reply.status, reply.ename) == ("error", "NodeLost"), reply.story
    assert says in reply.evalue, reply.story
    all_gone(doomed)
    runs_again(kernel)


@pytest.mark.parametrize(
    "which", ["pool", *(pytest.param(each, marks=pytest.mark.slow) for each in ("agent", "zygote", "standby"))]
)
@pytest.mark.slow
def test_a_kill_while_nothing_runs(kernel: Kernel, home: Home, which: str):
    runs_again(kernel)
    standby_ready(home, 2)
    standby = set(home.standby_pids())
    pool = home.pool_pid()
    doomed = {"pool": others(home), "agent": others(home) - {pool}}.get(which, standby)
    (pid, *_) = victims(home, which)
    kill(pid)
    if which == "standby":
        wait_gone(pid)
    else:
        # an agent that has just ended a run waits as long as if it still had it
        all_gone(doomed | {pid}, GONE_S + (ADOPT_S if which == "pool" else 0.0))
    runs_again(kernel)
    assert (home.pool_pid() == pool) is (which != "pool")


@pytest.mark.slow
@pytest.mark.parametrize("work", ["sleep", "barrier"])
def test_a_killed_kernel_takes_its_run_along(home: Home, new_kernel: Callable[..., Kernel], work: str):
    kernel = new_kernel()
    begun(kernel, work)
    ranks, pool, run_id = set(home.rank_pids()), home.pool_pid(), newest(home)
    kernel.kill()
    all_gone(ranks)
    eventually(lambda: not home.unexpected(), GONE_S, lambda: f"left: {home.unexpected()}")
    assert home.pool_pid() == pool
    ended = eventually(lambda: final_event(home, run_id), 5, "no last word")
    assert ended.state == "cancelled"
    runs_again(new_kernel())


@pytest.mark.slow
def test_a_killed_kernel_while_nothing_runs(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    kernel.check("import torch; big = torch.ones(1_000_000)")
    kernel.check("%%distributed -n 2 --ui none\nbig.sum()")
    pool = home.pool_pid()
    kernel.kill()
    eventually(lambda: not home.unexpected(), GONE_S, lambda: f"left: {home.unexpected()}")
    assert home.pool_pid() == pool
    runs_again(new_kernel())


def newest(home: Home) -> str:
    def at(run_id: str) -> float:
        with contextlib.suppress(OSError):
            return next(iter(EventFile(home.run_dir(run_id)).new_events()))[0].at
        return 0.0

    return max(home.runs, key=at)


def final_event(home: Home, run_id: str) -> RunEnded | None:
    for event, _ in EventFile(home.run_dir(run_id)).new_events():
        if isinstance(event.body, RunEnded):
            return event.body
    return None


# ---------------------------------------------------------------- the pool's own life


def test_the_pool_starts_by_itself_and_is_shared(home: Home, kernel: Kernel, new_kernel: Callable[..., Kernel]):
    other = new_kernel(load=False)
    runs_again(kernel)
    pool = home.pool_pid()
    other.check("%load_ext sgpu_magic")
    runs_again(other)
    assert home.pool_pid() == pool
    assert os.getsid(pool or 0) != os.getsid(other.pid)


@pytest.mark.slow
def test_the_pool_outlives_kernels_and_restarts(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    runs_again(kernel)
    pool = home.pool_pid()
    begun(kernel, "barrier")
    ranks = set(home.rank_pids())
    kernel.restart()
    all_gone(ranks)
    assert home.pool_pid() == pool
    kernel.check("%load_ext sgpu_magic")
    runs_again(kernel)
    assert home.pool_pid() == pool
    kernel.close()
    eventually(lambda: not home.unexpected(), GONE_S, lambda: f"left: {home.unexpected()}")
    assert home.pool_pid() == pool


@pytest.mark.slow
def test_unloading_ends_nothing_but_the_link(home: Home, new_kernel: Callable[..., Kernel]):
    kernel = new_kernel()
    runs_again(kernel)
    pool = home.pool_pid()
    kernel.check("%unload_ext sgpu_magic")
    assert kernel.run("%%distributed\n1").status == "error"
    kernel.check("%load_ext sgpu_magic")
    runs_again(kernel)
    assert home.pool_pid() == pool


@pytest.mark.slow
def test_the_pool_ends_itself_when_nobody_needs_it(new_home: Callable[..., Home]):
    """After a warning, also while notebooks are open: idle ranks are not theirs to keep."""
    home = new_home({"SGPU_POOL_IDLE_S": "2"})
    kernel = Kernel(home)
    try:
        cell = kernel.start("%%distributed -n 2\nimport time\nfor i in range(60):\n    print(i)\n    time.sleep(0.05)")
        assert cell.wait(30).status == "ok", "a pool ends although a run goes on"
        everything = {home.pool_pid() or 0, *home.agent_pids(), *home.zygote_pids()}
        cell.until_shown("ends its processes", 10)
        assert all(map(is_alive, everything)), "the warning comes too late"
        all_gone(everything, 2 + GONE_S)
        assert [entry.name for entry in home.runtime.iterdir()] == ["pool.lock"]
        runs_again(kernel)
    finally:
        kernel.close()


@pytest.mark.slow
def test_a_pool_whose_starter_has_gone_meanwhile_serves_others(new_home: Callable[..., Home]):
    """A cell that is interrupted while it starts the pool no longer reads what the pool says."""
    home = new_home()
    starter = subprocess.Popen(
        [sys.executable, "-m", "sgpu_magic.pool"], env=home.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    starter.stdout.close()
    starter.wait(20)
    pool = eventually(home.pool_pid, 15, "the pool's address")
    kernel = Kernel(home)
    try:
        runs_again(kernel)
        assert home.pool_pid() == pool
    finally:
        kernel.close()


@pytest.mark.slow
def test_what_a_killed_pool_left_is_in_nobodys_way(home: Home, kernel: Kernel, new_kernel: Callable[..., Kernel]):
    runs_again(kernel)
    (pool,) = victims(home, "pool")
    kill(pool)
    wait_gone(pool)
    assert (home.state / "pool.json").exists()
    assert (home.runtime / "pool.sock").exists()
    runs_again(new_kernel())
    assert home.pool_pid() != pool


@pytest.mark.slow
def test_an_address_of_a_process_that_is_no_pool(
    home: Home, kernel: Kernel, new_kernel: Callable[..., Kernel], stranger: int
):
    runs_again(kernel)
    (pool,) = victims(home, "pool")
    kill(pool)
    wait_gone(pool)
    file = home.state / "pool.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": stranger}))
    runs_again(new_kernel())
    assert is_alive(stranger)


@pytest.mark.slow
def test_a_damaged_address_file(home: Home, kernel: Kernel, new_kernel: Callable[..., Kernel]):
    """What else may stand there, tests/unit/client/test_local_pool.py has."""
    runs_again(kernel)
    (pool,) = victims(home, "pool")
    kill(pool)
    wait_gone(pool)
    (home.state / "pool.json").write_bytes(b"{")
    runs_again(new_kernel())


OTHER_VERSION = """
import fcntl, os, sys, zmq, msgspec
runtime, state, version, busy, start = *sys.argv[1:3], int(sys.argv[3]), sys.argv[4] == "busy", None
lock = os.open(f"{state}/pool.lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
router = zmq.Context().socket(zmq.ROUTER)
for left in (f"{runtime}/pool.sock", f"{state}/pool.json"):
    if os.path.exists(left):
        os.unlink(left)
router.bind(f"ipc://{runtime}/pool.sock")
with open("/proc/self/stat", "rb") as file:
    start = int(file.read().rpartition(b")")[2].split()[19])
with open(f"{state}/pool.json", "wb") as file:
    file.write(msgspec.json.encode({"pid": os.getpid(), "process_start": start, "protocol_version": version,
                                    "package_version": f"{version}.0", "started_at": 1.0}))
print("ready", flush=True)
while True:
    identity, *parts = router.recv_multipart()
    if msgspec.msgpack.decode(parts[0]).get("type") == "hello":
        router.send_multipart([identity, msgspec.msgpack.encode({
            "type": "welcome", "protocol_version": version,
            "package_version": f"{version}.0", "pid": os.getpid(), "busy": busy})])
"""


@pytest.fixture
def other_version(home: Home) -> Iterator[Callable[[int, str], subprocess.Popen[str]]]:
    """Starts a pool that speaks another protocol in this home: `other_version(99, "busy")`."""
    started: list[subprocess.Popen[str]] = []

    def start(version: int, busy: str) -> subprocess.Popen[str]:
        pool = home.pool_pid()
        if pool is not None:
            stop_process(pool, signal.SIGTERM, 10)
        command = [sys.executable, "-c", OTHER_VERSION, str(home.runtime), str(home.state), str(version), busy]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("version", [pytest.param(0, marks=pytest.mark.slow), 99])
@pytest.mark.slow
def test_an_idle_pool_of_another_version_is_replaced(
    kernel: Kernel, home: Home, other_version: Callable[[int, str], subprocess.Popen[str]], version: int
):
    other = other_version(version, "idle")
    runs_again(kernel)
    assert other.wait(5) == -signal.SIGTERM
    assert home.pool_pid() not in (None, other.pid)


def test_a_pool_of_another_version_is_stopped_by_the_command_when_it_is_idle(
    home: Home, other_version: Callable[[int, str], subprocess.Popen[str]]
):
    stop = [sys.executable, "-m", "sgpu_magic.cli", "pool", "stop"]
    other = other_version(99, "busy")
    done = subprocess.run(stop, env=home.environ, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "`sgpu pool stop --force`" in done.stderr
    assert other.poll() is None
    other.kill()
    other = other_version(99, "idle")
    done = subprocess.run(stop, env=home.environ, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"the local pool (process {other.pid}) is stopped\n"
    assert other.wait(5) == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 99])
def test_a_busy_pool_of_another_version_is_left_alone(
    kernel: Kernel, home: Home, other_version: Callable[[int, str], subprocess.Popen[str]], version: int
):
    other = other_version(version, "busy")
    reply = kernel.run("%%distributed -n 2\n1")
    assert (reply.status, reply.ename) == ("error", "PoolVersionError"), reply.story
    assert f"sgpu-magic {version}.0" in reply.evalue
    assert f"protocol {version}" in reply.evalue
    assert "sgpu pool stop" in reply.evalue
    assert len(reply.traceback.strip().splitlines()) == 2, "one paragraph and its section"
    assert other.poll() is None
    assert "`sgpu pool stop --force`" in reply.evalue
    kernel.check(f"!{sys.executable} -m sgpu_magic.cli pool stop --force")
    assert other.wait(10) is not None
    runs_again(kernel)


CLIENT = """
import sys
from sgpu_magic.client.pool import Pool
from sgpu_magic.config import load_settings
sys.stdin.readline()
print(Pool(load_settings()).status().pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_many_clients_at_the_same_moment_start_one_pool(new_home: Callable[..., Home]):
    home = new_home()
    for _ in range(10):
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", CLIENT],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=home.environ,
            )
            for _ in range(3)
        ]  # fmt: skip
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        seen = {int(client.stdout.readline()) for client in clients if client.stdout is not None}
        assert seen == {home.pool_pid()}
        for client in clients:
            client.communicate("end\n")
        (pool,) = seen
        everything = set(home.processes())
        stop_process(pool, signal.SIGTERM, 10)
        all_gone(everything)


@pytest.mark.slow
def test_a_pool_that_is_asked_to_end_ends_its_run_and_says_so(kernel: Kernel, home: Home):
    cell = begun(kernel, "barrier")
    everything = others(home)
    (pool,) = victims(home, "pool")
    stop_process(pool, signal.SIGTERM, 10)
    reply = cell.wait(10)
    assert (reply.status, reply.ename) == ("error", "RunCancelled"), reply.story
    assert "the pool was stopped" in reply.evalue, reply.story
    all_gone(everything)
    runs_again(kernel)


def test_a_pool_that_dies_while_a_client_connects_is_replaced(kernel: Kernel, home: Home):
    def connections() -> int:
        return Path("/proc/net/unix").read_text().count(f"{home.runtime}/pool.sock")

    runs_again(kernel)
    (pool,) = victims(home, "pool")
    send(signal.SIGSTOP, pool)
    before = connections()
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=home.environ
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("go\n")
        client.stdin.flush()
        eventually(lambda: connections() > before, 20, "it connects")
        os.kill(pool, signal.SIGKILL)
        found = client.stdout.readline()
        client.communicate("end\n")
    assert found, "it failed"
    assert int(found) == home.pool_pid() != pool


# ---------------------------------------------------------------- an agent that hangs


@pytest.mark.slow
def test_a_forced_stop_ends_a_stopped_agent_and_the_next_cell_runs(kernel: Kernel, home: Home):
    runs_again(kernel)
    everything = others(home)
    (agent,) = victims(home, "agent")
    send(signal.SIGSTOP, agent)
    command(home, "pool", "stop", "--force")
    all_gone(everything)
    runs_again(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["agent", "zygote", "adopted agent"])
def test_a_run_says_that_what_starts_its_ranks_is_stopped(kernel: Kernel, home: Home, who: str):
    runs_again(kernel)
    stopped = victims(home, who.removeprefix("adopted "))
    if who == "adopted agent":
        # an agent without a run ends with its pool service
        kernel.check("%%distributed -n 1 --nowait --name keeps\nimport time\ntime.sleep(600)")
        eventually(lambda: ranks_of(home, home.run_named("keeps")), 20, "the run that keeps the agent")
        (pool,) = victims(home, "pool")
        os.kill(pool, signal.SIGKILL)
        runs_again(kernel)
        assert victims(home, "agent") == stopped, "the new pool adopts the agent of the earlier one"
    send(signal.SIGSTOP, *stopped)
    try:
        cell = kernel.start("%%distributed -n 2\nprint('healed')")
        cell.until(lambda: f"process {stopped[0]} of the pool is stopped" in _warnings(cell), 20, "the note")
        assert f"kill -CONT {stopped[0]}" in _doctor(home)
    finally:
        send(signal.SIGCONT, *stopped)
    assert cell.wait(40).lines(1) == ["healed"]
    if who == "adopted agent":
        send(signal.SIGKILL, *ranks_of(home, home.run_named("keeps")))


def _doctor(home: Home) -> str:
    words = [sys.executable, "-m", "sgpu_magic.cli", "doctor"]
    return subprocess.run(words, env=home.environ, capture_output=True, text=True, timeout=60, check=False).stdout


def _warnings(cell: Cell) -> str:
    views = [output.view for output in cell.reply.outputs if output.view is not None]
    return "\n".join(text for view in views for text in view.snapshot.get("warnings", ()))


@pytest.mark.slow
def test_an_adopted_agent_that_does_not_answer_is_replaced(kernel: Kernel, home: Home):
    runs_again(kernel)
    agents = victims(home, "agent")
    send(signal.SIGSTOP, *agents, *victims(home, "zygote"))
    kill(*victims(home, "pool"))
    reply = kernel.start("%%distributed -n 2\nprint('healed')").wait(40)
    assert reply.status == "ok", reply.story
    all_gone(set(agents))


# ---------------------------------------------------------------- the queue across kernels


@pytest.mark.slow
def test_first_come_first_served_across_kernels(new_home: Callable[..., Home]):
    home = new_home({"SGPU_SIMULATE": "a10:2"})
    kernels = [Kernel(home) for _ in range(3)]
    try:
        holding = kernels[0].start(
            "%%distributed -n 2\nimport pathlib, time\nprint('holds', flush=True)\n"
            "while not pathlib.Path('go').exists(): time.sleep(0.01)"
        )
        holding.until_shown("holds")
        cells: list[Cell] = []
        for number, kernel in enumerate([kernels[1], kernels[2]]):
            cell = kernel.start(f"%%distributed -n 2 --name waits-{number}\nprint('ran')")
            cell.until_shown(f"position {number + 1}" if number else "queued", 15)
            cells.append(cell)
        (home.work / "go").touch()
        assert holding.wait().status == "ok"
        assert [cell.wait().status for cell in cells] == ["ok", "ok"]
        started = {}
        for run_id in home.runs:
            name = json.loads((home.run_dir(run_id) / "run.json").read_text())["spec"]["name"]
            (at,) = [e.at for e, _ in EventFile(home.run_dir(run_id)).new_events() if isinstance(e.body, RanksStarted)]
            started[name] = at
        assert started["waits-0"] < started["waits-1"]
    finally:
        for kernel in kernels:
            kernel.close()


# ---------------------------------------------------------------- what a rank starts


CHILDREN = """\
import os, pathlib, subprocess, sys
plain = subprocess.Popen(["sleep", "3601"])
away = subprocess.Popen(["sleep", "3602"], start_new_session=True)
twice = subprocess.Popen([sys.executable, "-c", "import os, time; os.fork() and os._exit(0); os.setsid(); "
                          "open('twice', 'w').write(str(os.getpid())); time.sleep(3603)"])
twice.wait()
while not os.path.exists("twice") or not open("twice").read(): pass
pathlib.Path("children").write_text(f"{plain.pid} {away.pid} {open('twice').read()}")
print("begun", flush=True)
"""


@pytest.fixture
def children_file(home: Home) -> Iterator[Path]:
    file = home.work / "children"
    yield file
    file.unlink(missing_ok=True)
    (home.work / "twice").unlink(missing_ok=True)


def children_of(file: Path) -> set[int]:
    found = {int(pid) for pid in file.read_text().split()}
    assert len(found) == 3
    return found


@pytest.mark.parametrize("ending", ["", "raise ValueError('no')", "os.kill(os.getpid(), 9)"])
def test_what_a_rank_started_ends_with_the_run(kernel: Kernel, children_file: Path, ending: str):
    reply = kernel.run(f"%%distributed -n 1\n{CHILDREN}\n{ending}")
    assert reply.status == ("error" if ending else "ok"), reply.story
    all_gone(children_of(children_file))


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("agent", marks=pytest.mark.slow),
        pytest.param("zygote", marks=pytest.mark.slow),
        pytest.param("rank", marks=pytest.mark.slow),
        "kernel",
        pytest.param("pool and agent", marks=pytest.mark.slow),
        pytest.param("kernel and pool", marks=pytest.mark.slow),
    ],
)
def test_what_a_rank_started_ends_with_whoever_is_killed(
    home: Home, new_kernel: Callable[..., Kernel], children_file: Path, which: str
):
    kernel = new_kernel()
    cell = kernel.start(f"%%distributed -n 1\n{CHILDREN}\n{SLEEP}")
    cell.until_shown("begun", 20)
    children = eventually(lambda: children_file.exists() and children_of(children_file), 5)
    if "kernel" in which:
        kernel.kill()
    kill(*(pid for name in which.split(" and ") if name != "kernel" for pid in victims(home, name)))
    all_gone(children)
    eventually(lambda: not home.unexpected(), GONE_S, lambda: f"left: {home.unexpected()}")
    if "kernel" not in which:
        assert cell.wait(10).status == "error"


@pytest.mark.slow
def test_what_a_rank_started_lives_on_when_the_pool_is_killed(
    kernel: Kernel, home: Home, children_file: Path, go_file: Path
):
    wait = "import time\nwhile not os.path.exists('go'): time.sleep(0.02)"
    cell = kernel.start(f"%%distributed -n 1\n{CHILDREN}\n{wait}")
    cell.until_shown("begun", 20)
    children = eventually(lambda: children_file.exists() and children_of(children_file), 5)
    kill(*victims(home, "pool"))
    cell.until_shown("taken over the run", 15)
    assert all(map(is_alive, children))
    go_file.touch()
    assert cell.wait(10).status == "ok"
    all_gone(children)


@pytest.mark.slow
def test_a_child_without_any_mark_ends_with_the_pool(new_home: Callable[..., Home]):
    """A daemon that cleared its environment can't be told from others, but it never gets past the subreapers."""
    home = new_home()
    kernel = Kernel(home)
    try:
        kernel.check(
            textwrap.dedent("""\
            %%distributed -n 1 --out hidden --ui none
            import subprocess
            hidden = subprocess.Popen(["sleep", "3604"], start_new_session=True, env={}).pid""")
        )
        hidden = kernel.value("hidden")
    finally:
        kernel.close()
    stop_process(home.pool_pid() or 0, signal.SIGTERM, 10)
    all_gone({hidden})


def test_process_start_tells_a_pid_that_was_given_again(stranger: int):
    assert process_start(stranger) > 0
    assert process_start(2**22 - 1) == 0
