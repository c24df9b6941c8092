"""Several machines behind ssh as one pool: the first has the pool service, which logs in to the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import nvml_stub as nvml
import psutil
import pytest
from homes import Home
from kernels import Cell, Kernel
from ssh_servers import SshMachines, needs_sshd, sgpu
from waiting import eventually

pytestmark = [needs_sshd, pytest.mark.slow]

nvml_stub = nvml.nvml_stub
CELL = "%%distributed -n 3 --type cpu --pool lab --placement spread"
SUM = (
    "import os, torch, torch.distributed as dist\ntotal = torch.ones(1)\ndist.all_reduce(total)\n"
    "home, total = os.environ['HOME'], total.item()"
)

NewHome = Callable[..., Home]


@pytest.fixture
def homes(new_home: NewHome) -> list[Home]:
    """The homes of three machines."""
    return [new_home() for _ in range(3)]


@pytest.fixture
def machines(homes: list[Home], new_home: NewHome, tmp_path: Path) -> Iterator[SshMachines]:
    made = SshMachines(tmp_path / "machines", homes, new_home())
    yield made
    # the first machine's pool ends the agents of the others
    sgpu(made.user, "pool", "stop", "lab", "--force")
    made.stop()


@pytest.fixture
def notebook(machines: SshMachines) -> Iterator[Kernel]:
    with contextlib.closing(Kernel(machines.user)) as kernel:
        yield kernel


def those(home: Home, words: str) -> list[psutil.Process]:
    """Return the processes of a machine that have these words in their command."""
    return [psutil.Process(pid) for pid, process in home.processes().items() if words in process.command]


def waiting_cell(notebook: Kernel, go: Path) -> Cell:
    """Start a cell whose ranks wait for a file, then print 100 lines each."""
    cell = notebook.start(
        f"{CELL}\nimport pathlib, time\nprint('begun')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nfor at in range(100): print('line', at)"
    )
    cell.until(lambda: cell.reply.text.count("begun\n") >= 3, 60, "all ranks have begun")
    return cell


def nothing_is_left(machines: SshMachines, homes: list[Home]) -> None:
    """Check that a removed pool has left neither processes nor files."""
    for server, home in zip(machines.servers, homes, strict=True):
        eventually(lambda home=home: not home.processes(), 15, lambda home=home: f"left there: {home.processes()}")
        folders = (server.user_home, home.state, home.runtime)
        assert [path for folder in folders for path in folder.rglob("*") if not path.is_dir()] == []


def test_a_run_is_on_all_machines_and_nothing_is_left_of_a_removed_pool(
    notebook: Kernel, machines: SshMachines, homes: list[Home]
) -> None:
    notebook.check(f"{CELL} --out home:all --out total\n{SUM}", 120)
    assert sorted(notebook.value("home")) == sorted(str(server.user_home) for server in machines.servers)
    assert notebook.value("total") == 3
    status = notebook.check("%sgpu_status --pool lab").text
    assert "3 nodes" in status
    removed = sgpu(machines.user, "pool", "remove", "lab", "--records")
    assert removed.stdout.count("Nothing of sgpu-magic is left on node") == 3, removed
    nothing_is_left(machines, homes)


def test_packages_are_installed_on_every_node_and_files_come_back(
    homes: list[Home], new_home: NewHome, tmp_path: Path
) -> None:
    machines = SshMachines(tmp_path / "others", homes, new_home(), same_files=False)
    try:
        with contextlib.closing(Kernel(machines.user)) as notebook:
            notebook.check("large = bytes(3_000_000)")
            cell = (
                f"{CELL} --out found:all --out kept:all\nimport sys\nfound, kept = (sys.prefix, len(large)), large[:2]"
            )
            notebook.check(cell, 200)
            prefixes = [prefix for prefix, _ in notebook.value("found")]
            assert all("/environments/" in prefix for prefix in prefixes)
            assert len(set(prefixes)) == 3
            assert notebook.value("[len(each) for each in kept]") == [2, 2, 2]
        removed = sgpu(machines.user, "pool", "remove", "lab", "--records")
        assert removed.stdout.count("Nothing of sgpu-magic is left on node") == 3, removed
        nothing_is_left(machines, homes)
    finally:
        machines.stop()


def test_a_run_outlives_broken_logins_between_machines(notebook: Kernel, homes: list[Home]) -> None:
    go = homes[0].work / "go"
    cell = waiting_cell(notebook, go)
    broken = those(homes[0], "exec /bin/sh -s")
    assert len(broken) == 2
    for login in broken:
        login.kill()
    go.touch()
    reply = cell.wait(60)
    assert reply.status == "ok", reply.story
    assert [reply.lines(rank) for rank in range(3)] == [["begun", *(f"line {at}" for at in range(100))]] * 3


def test_a_run_outlives_the_pool_service(notebook: Kernel, homes: list[Home]) -> None:
    go = homes[0].work / "go"
    cell = waiting_cell(notebook, go)
    (service,) = those(homes[0], "-m sgpu_magic.pool")
    service.kill()
    go.touch()
    reply = cell.wait(60)
    assert reply.status == "ok", reply.story
    assert [reply.lines(rank) for rank in range(3)] == [["begun", *(f"line {at}" for at in range(100))]] * 3


def test_a_dead_agent_is_named_and_the_next_run_has_all_nodes_again(notebook: Kernel, homes: list[Home]) -> None:
    cell = waiting_cell(notebook, homes[0].work / "never")
    (agent,) = those(homes[1], "-m sgpu_magic.agent")
    agent.kill()
    reply = cell.wait(60)
    assert reply.ename == "NodeLost", reply.story
    assert "its agent ended unexpectedly" in reply.evalue
    eventually(lambda: "3 nodes" in notebook.check("%sgpu_status --pool lab").text, 15, "the node is back")
    notebook.check(f"{CELL} --out home:all\n{SUM}", 60)
    assert len(set(notebook.value("home"))) == 3


def test_a_machine_that_is_lost_ends_its_runs_and_says_why(
    notebook: Kernel, machines: SshMachines, homes: list[Home]
) -> None:
    cell = waiting_cell(notebook, homes[0].work / "never")
    machines.servers[1].stop()
    (end,) = those(homes[1], "sgpu_magic.nodes.ssh.node_end")
    end.kill()
    # the runs go on for a minute
    reply = cell.wait(120)
    assert reply.ename == "NodeLost", reply.story
    assert "nothing listens at its ssh port" in reply.evalue
    assert "2 nodes" in notebook.check("%sgpu_status --pool lab").text
    machines.servers[1].start()
    eventually(lambda: "3 nodes" in notebook.check("%sgpu_status --pool lab").text, 60, "the node is back")
    eventually(lambda: not homes[1].rank_pids(), 15, "the ranks of the lost run have ended")


def test_a_machine_that_can_not_be_used_is_named_and_the_others_are(notebook: Kernel, machines: SshMachines) -> None:
    (machines.servers[2].folder / "authorized_keys").write_text("")
    notebook.check("%%distributed -n 2 --type cpu --pool lab --placement spread\npass", 120)
    reply = notebook.run("%%distributed -n 1 --type h100 --pool lab\npass")
    assert "the node " in reply.evalue, reply.story
    assert "does not admit you" in reply.evalue


def test_doctor_goes_from_the_first_machine_to_the_others(machines: SshMachines) -> None:
    (machines.servers[2].folder / "authorized_keys").write_text("")
    checked = sgpu(machines.user, "doctor", "--pool", "lab", "--json", timeout_s=120)
    findings = {finding["name"]: finding["level"] for finding in json.loads(checked.stdout)["findings"]}
    second, third = (f"{server.user}@127.0.0.1:{server.port}" for server in machines.servers[1:])
    assert findings["login"] == findings[f"{second} login"] == findings[f"{second} all_reduce"] == "ok", findings
    assert findings[f"{third} key"] == "problem", findings


def test_devices_that_another_pool_of_a_node_holds_are_waited_for(
    homes: list[Home], new_home: NewHome, tmp_path: Path, nvml_stub: Callable[..., dict[str, str]]
) -> None:
    devices = [nvml_stub(devices=[nvml.StubGpu(uuid=nvml.gpu_uuid(number), bus=1)]) for number in range(3)]
    user = new_home()
    for home, own in zip(homes, devices, strict=True):
        home.environ |= own
    for home in (user, homes[1]):
        # this torch has no CUDA
        home.environ["SGPU_STAND_IN"] = "cpu"
    machines = SshMachines(tmp_path / "others", homes, user, variables=devices)
    cell = "%%distributed -n 3 --type a10 --pool lab"
    try:
        with contextlib.closing(Kernel(machines.user)) as notebook, contextlib.closing(Kernel(homes[1])) as there:
            notebook.check(f"{cell} --out seen:all\nimport os\nseen = os.environ['CUDA_VISIBLE_DEVICES']", 120)
            assert sorted(notebook.value("seen")) == sorted(nvml.gpu_uuid(number) for number in range(3))
            go = homes[1].work / "go"
            holding = there.start(
                f"%%distributed -n 1 --type a10\nimport pathlib, time\nprint('begun')\n"
                f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
            )
            holding.until_shown("[0] begun", 60)
            refused = notebook.run(f"{cell} --wait 0\npass")
            assert refused.ename == "CapacityError", refused.story
            waiting = notebook.start(f"{cell}\nprint('mine now')")
            go.touch()
            assert holding.wait(60).status == "ok", holding.reply.story
            reply = waiting.wait(60)
            assert reply.status == "ok", reply.story
        sgpu(machines.user, "pool", "stop", "lab", "--force")
    finally:
        machines.stop()
