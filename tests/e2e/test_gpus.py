"""GPUs on a machine that has none: NVML is a stand-in, everything else is real."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping

import nvml_stub as nvml
import pytest
from kernels import Home, Kernel, eventually

nvml_stub = nvml.nvml_stub
UUIDS = [nvml.gpu_uuid(number) for number in range(4)]
WHERE = "import os; out = [os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER'], str(device)]"


@pytest.fixture(scope="module")
def machine(nvml_stub: Callable[..., dict[str, str]]) -> dict[str, str]:
    """The variables of a machine with four idle A10s."""
    return nvml_stub()


@pytest.fixture(scope="module")
def home(machine: dict[str, str]) -> Iterator[Home]:
    made = Home(machine)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def idle_gpus(kernel: Kernel, machine: dict[str, str]) -> Iterator[None]:
    # the pool may still see the changes of the test before
    eventually(lambda: "in use outside" not in kernel.check("%sgpu_status").text, 10, "idle devices")
    yield
    nvml.change(machine, nvml.a10s(4))


def change(machine: Mapping[str, str], **changes: object) -> None:
    """Give GPU 1 other properties. The pool looks again before it places a run, at most every 2 s."""
    gpus = nvml.a10s(4)
    gpus[1] = nvml.StubGpu(uuid=UUIDS[1], bus=2, **changes)  # pyright: ignore[reportArgumentType]
    nvml.change(machine, gpus)


def seen_busy(kernel: Kernel, count: int) -> None:
    """Wait until the pool's view has so many devices in use outside."""
    eventually(
        lambda: kernel.check("%sgpu_status").text.count("in use outside the pool") >= count, 10, "the pool's view"
    )


def ranks_on(kernel: Kernel, options: str) -> list[list[str]]:
    kernel.check(f"%%distributed {options} --out out:all --ui none\n{WHERE}")
    return kernel.value("out")


def test_status_lists_what_the_driver_says(kernel: Kernel):
    reply = kernel.check("%sgpu_status")
    assert "A10" in reply.text
    assert reply.text.count("A10") >= 4 or "4 " in reply.text
    assert "<table" in reply.html


def test_a_run_gets_its_devices_in_rank_order(kernel: Kernel):
    out = ranks_on(kernel, "-n 4 --type a10")
    visible, order, _ = out[0]
    assert visible.split(",") == UUIDS
    assert {entry[0] for entry in out} == {visible}
    assert order == "PCI_BUS_ID"


@pytest.fixture
def no_stand_in(kernel: Kernel) -> Iterator[None]:
    kernel.check("import os; del os.environ['SGPU_STAND_IN']")
    yield
    kernel.check("os.environ['SGPU_STAND_IN'] = 'cpu'")


@pytest.mark.usefixtures("no_stand_in")
def test_ranks_whose_torch_cannot_use_their_gpus_fail_with_its_reason(kernel: Kernel):
    # torch's own message; a torch with CUDA on a machine without GPUs has another one
    reason = r"can't use the GPU of rank \d on \S+: (Torch not compiled with CUDA|.*(NVIDIA|GPU))"
    reply = kernel.run("%%distributed -n 2 --type a10\nprint('never ' + 'here')")
    assert reply.ename == "EnvironmentFailed", reply.story
    assert re.search(reason, reply.evalue)
    assert "never here" not in reply.text
    kernel.check("%sgpu_connect -n 2 --type a10")
    reply = kernel.run("%%distributed\nprint('never ' + 'here')")
    assert reply.status == "error"
    assert re.search(reason, reply.evalue), reply.story
    # the remedy that needs no other build of torch
    assert kernel.check("%%distributed -n 2 --type cpu\nprint('on the CPU')").lines(0) == ["on the CPU"]


@pytest.mark.slow
def test_a_rank_of_slices_sees_its_own_and_no_whole_gpu_beside_it(kernel: Kernel, machine: dict[str, str]):
    slices = [nvml.StubSlice(f"MIG-{number}", "NVIDIA A10 MIG 1g.6gb", memory_bytes=6_000_000_000) for number in (1, 2)]
    gpus = [nvml.StubGpu(uuid=UUIDS[0], bus=1, slices=slices), *nvml.a10s(4)[1:]]
    nvml.change(machine, gpus)
    eventually(lambda: "a10-1g.6gb" in kernel.check("%sgpu_status").text.lower(), 10, "the pool's view")
    assert [entry[0] for entry in ranks_on(kernel, "-n 2 --type a10-1g.6gb")] == ["MIG-1", "MIG-2"]
    assert [entry[0] for entry in ranks_on(kernel, "-n 3 --type a10")] == [",".join(UUIDS[1:])] * 3
    nvml.change(machine, nvml.a10s(4))
    again = "%%distributed -n 4 --type a10 --ui none\n1"
    eventually(lambda: kernel.run(again).status == "ok", 10, "the pool's view")


@pytest.mark.parametrize("options", ["-n 2", "-n 2 --type A10", "-n 2 --type any", '-n 2 --type "NVIDIA A10"'])
def test_the_type_may_be_said_in_many_ways(kernel: Kernel, options: str):
    out = ranks_on(kernel, options)
    assert len(out) == 2
    assert len(set(out[0][0].split(",")) & set(UUIDS)) == 2


def test_without_a_number_all_devices_are_taken(kernel: Kernel):
    out = ranks_on(kernel, "")
    assert len(out) == 4
    assert out[0][0].split(",") == UUIDS


def test_cpu_ranks_see_no_gpu(kernel: Kernel):
    assert ranks_on(kernel, "-n 2 --type cpu") == [["", "PCI_BUS_ID", "cpu"]] * 2


@pytest.mark.usefixtures("no_stand_in")
@pytest.mark.parametrize(
    ("options", "says"),
    [("-n 5", "4"), ("-n 2 --type h100", "a10"), ("-n 9 --type a10", "4")],
)
def test_more_than_there_is_or_another_type_is_refused(kernel: Kernel, home: Home, options: str, says: str):
    before = home.runs
    reply = kernel.run(f"%%distributed {options}\n1")
    assert (reply.status, reply.ename) == ("error", "UsageError"), reply.story
    assert says in reply.evalue.lower()
    assert len(reply.traceback.strip().splitlines()) == 2, "one paragraph and its section"
    assert home.runs == before


@pytest.fixture
def foreign() -> Iterator[subprocess.Popen[bytes]]:
    """A process outside the pool."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_foreign_process_keeps_a_device_out(
    kernel: Kernel, machine: dict[str, str], foreign: subprocess.Popen[bytes]
):
    change(machine, processes=[nvml.StubProcess(foreign.pid, 1 << 20)])
    eventually(lambda: str(foreign.pid) in kernel.check("%sgpu_status").text, 10, "the pool's view")
    reply = kernel.run("%%distributed -n 4 --wait 0\n1")
    assert (reply.status, reply.ename) == ("error", "CapacityError"), reply.story
    assert "allow-busy" in reply.evalue
    out = ranks_on(kernel, "-n 3")
    assert out[0][0].split(",") == [UUIDS[0], UUIDS[2], UUIDS[3]]
    out = ranks_on(kernel, "-n 4 --allow-busy")
    assert out[0][0].split(",") == UUIDS
    assert foreign.poll() is None


@pytest.mark.needs_root
@pytest.mark.skipif(os.getuid() != 0, reason="what another user does needs root")
@pytest.mark.slow
def test_what_another_user_does_to_a_lock_is_that_devices_state(kernel: Kernel, home: Home):
    """A run goes on, the device is out with its reason and remedy, all others can be had."""
    lock = home.path / "lock" / f"{UUIDS[2]}.lock"
    holding = kernel.start(
        "%%distributed -n 1 --type cpu\nimport pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)"
    )
    holding.until(lambda: len(home.rank_pids()) == 1, 20, "a rank")
    pool, agents = home.pool_pid(), home.agent_pids()
    lock.unlink(missing_ok=True)
    lock.symlink_to("/etc/passwd")
    (home.work / "go").touch()
    try:
        assert holding.wait(20).status == "ok", holding.reply.story
        remedy = "not a regular file with a single link, so sgpu-magic did not create it. Have its owner or root remove"
        eventually(lambda: remedy in kernel.check("%sgpu_status").text, 10, "the device's state")
        assert ranks_on(kernel, "-n 3")[0][0].split(",") == [UUIDS[0], UUIDS[1], UUIDS[3]]
        for options in ("-n 4 --wait 0", "-n 4 --wait 0 --allow-busy"):
            reply = kernel.run(f"%%distributed {options}\n1")
            assert (reply.status, reply.ename) == ("error", "CapacityError"), reply.story
            assert "1 is unavailable" in reply.evalue, reply.story
            assert remedy in reply.evalue, reply.story
        assert (home.pool_pid(), home.agent_pids()) == (pool, agents)
    finally:
        (home.work / "go").unlink()
        lock.unlink()
    eventually(lambda: kernel.run("%%distributed -n 4 --wait 0 --ui none\n1").status == "ok", 15, "the device again")


def test_a_run_follows_at_once_on_the_devices_of_the_one_before(kernel: Kernel):
    """A run that is over holds nothing as a user sees it, though its ranks take a moment to leave."""
    for _ in range(5):
        assert len(ranks_on(kernel, "-n 4 --wait 0")) == 4


def test_memory_in_use_keeps_a_device_out(kernel: Kernel, machine: dict[str, str]):
    change(machine, used_bytes=int(nvml.A10_BYTES * 0.04))
    kernel.check("%sgpu_status")
    assert len(ranks_on(kernel, "-n 4")) == 4
    change(machine, used_bytes=int(nvml.A10_BYTES * 0.06))
    seen_busy(kernel, 1)
    assert UUIDS[1] not in ranks_on(kernel, "-n 3")[0][0]


def test_a_run_waits_for_a_device_that_comes_free(kernel: Kernel, machine: dict[str, str]):
    change(machine, used_bytes=nvml.A10_BYTES // 2)
    seen_busy(kernel, 1)
    cell = kernel.start("%%distributed -n 4 --out x\nx = 1")
    cell.until_shown("in use outside the pool", 15)
    nvml.change(machine, nvml.a10s(4))
    assert cell.wait(30).status == "ok", cell.reply.story


@pytest.fixture
def two_pools(machine: dict[str, str], new_home: Callable[..., Home], home: Home) -> Iterator[tuple[Kernel, Kernel]]:
    """Kernels of two users' pools on one machine."""
    other = new_home({**machine, "SGPU_LOCK_DIR": str(home.path / "lock")})
    first, second = Kernel(home), Kernel(other)
    yield first, second
    first.close()
    second.close()


def test_two_pools_never_share_a_device(two_pools: tuple[Kernel, Kernel], home: Home):
    first, second = two_pools
    holding = first.start(
        "%%distributed -n 3\nimport pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)"
    )
    holding.until(lambda: len(home.rank_pids()) == 3, 20, "three ranks")
    seen_busy(second, 3)
    assert ranks_on(second, "-n 1 --wait 0")[0][0] == UUIDS[3]
    reply = second.run("%%distributed -n 2 --wait 0\n1")
    assert (reply.status, reply.ename) == ("error", "CapacityError"), reply.story
    (home.work / "go").touch()
    assert holding.wait().status == "ok"
    (home.work / "go").unlink()
    eventually(lambda: second.run("%%distributed -n 4 --wait 0 --ui none\n1").status == "ok", 15, "the locks' release")


@pytest.mark.slow
def test_the_ranks_of_a_killed_pool_keep_their_devices(two_pools: tuple[Kernel, Kernel], home: Home):
    first, second = two_pools
    holding = first.start(
        "%%distributed -n 4\nimport pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)"
    )
    holding.until(lambda: len(home.rank_pids()) == 4, 20, "four ranks")
    seen_busy(second, 4)
    pool = home.pool_pid()
    assert pool is not None
    os.kill(pool, 9)
    for _ in range(5):
        # before, while and after another service takes the ranks over
        reply = second.run("%%distributed -n 1 --wait 0\n1")
        assert (reply.status, reply.ename) == ("error", "CapacityError"), reply.story
    holding.until(lambda: home.pool_pid() not in (None, pool), 15, "the next pool")
    reply = second.run("%%distributed -n 1 --wait 0\n1")
    assert (reply.status, reply.ename) == ("error", "CapacityError"), reply.story
    (home.work / "go").touch()
    assert holding.wait(20).status == "ok", holding.reply.story
    (home.work / "go").unlink()
    for kernel in (second, first):
        eventually(lambda k=kernel: k.run("%%distributed -n 4 --wait 0 --ui none\n1").status == "ok", 15, "the devices")


@pytest.mark.slow
def test_nothing_holds_a_device_when_pool_and_agent_are_killed(two_pools: tuple[Kernel, Kernel], home: Home):
    first, second = two_pools
    holding = first.start("%%distributed -n 4\nimport time\ntime.sleep(600)")
    holding.until(lambda: len(home.rank_pids()) == 4, 20, "four ranks")
    pool, agents = home.pool_pid(), home.agent_pids()
    assert pool is not None
    for pid in (pool, *agents):
        os.kill(pid, 9)
    reply = holding.wait(30)
    assert (reply.status, reply.ename) == ("error", "NodeLost"), reply.story
    for kernel in (second, first):
        eventually(lambda k=kernel: k.run("%%distributed -n 4 --wait 0 --ui none\n1").status == "ok", 15, "the devices")
