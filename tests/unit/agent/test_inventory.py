"""The device inventory: the driver's facts as protocol records."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import nvml_stub as nvml
import pytest
from waiting import eventually

from sgpu_magic.agent.watch.inventory import take_inventory
from sgpu_magic.wire.devices import (
    KNOWN_TYPES,
    Device,
    Inventory,
    canonical_type,
    memory_bytes,
    memory_of,
    memory_text,
    used_bytes_of,
    vendor_bytes,
)

nvml_stub = nvml.nvml_stub
Stub = Callable[..., dict[str, str]]

ROOT = Path(__file__).parents[3]
GB = 1_000_000_000
TAKE = """
import sys, msgspec
from sgpu_magic.agent.watch.inventory import take_inventory
own = [int(pid) for pid in sys.argv[1].split()]
sys.stdout.buffer.write(msgspec.json.encode(take_inventory(simulate="", cpu_slots=16, own_pids=own)))
"""


def inventory(environ: dict[str, str], own_pids: Collection[int] = ()) -> Inventory:
    """What a process sees on a machine with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", TAKE, " ".join(map(str, own_pids))],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    return msgspec.json.decode(done.stdout, type=Inventory)


@pytest.fixture
def sleeper():
    """A process of ours and its child: (parent's pid, child's pid)."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '300']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        os.killpg(parent.pid, 9)


def me() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a10", "a10"),
        ("A10", "a10"),
        (" a10g ", "a10"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("A100-PCIE-40GB", "a100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "h100-1g.10gb+me"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h100-3g.40gb"),
        ("H100-3g.40GB", "h100-3g.40gb"),
        ("NVIDIA A30 MIG", "a30-mig"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H100 NVL", "h100"),
        ("h100-sxm", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100S-PCIE-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop"),
        ("GeForce GTX 1080 Ti", "gtx1080ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("NVIDIA TITAN RTX", "titanrtx"),
        ("NVIDIA GB10", "nvidia-gb10"),
        ("NVIDIA A10-24Q", "nvidia-a10-24q"),
        ("CPU", "cpu"),
        ("any", "any"),
    ],
)
def test_a_type_has_one_name_however_it_is_spelt(text: str, expected: str) -> None:
    assert canonical_type(text) == expected
    assert canonical_type(expected) == expected


@pytest.mark.parametrize(
    "text", ["", "  ", "banana", "a1o", "80GB", "sxm4", "nvidia", "mig", "a10:4", "gpu", "ä10", "4"]
)
def test_nonsense_is_no_type(text: str) -> None:
    with pytest.raises(ValueError, match="is not a device type"):
        canonical_type(text)


def test_a_misspelt_type_is_answered_with_those_close_to_it() -> None:
    with pytest.raises(ValueError, match=r"`h10` is not a device type. Did you mean .*`h100`"):
        canonical_type("h10")


def test_known_types_have_a_memory_size_and_are_their_own_names() -> None:
    assert {"a10", "a100", "h100", "h200", "rtx4090", "t4", "l40s", "b200", "rtx6000ada", "v100"} <= set(KNOWN_TYPES)
    for kind in KNOWN_TYPES:
        assert canonical_type(kind) == kind
        assert memory_of(kind) > 5 * GB
        assert vendor_bytes(memory_of(kind)) == memory_of(kind)
    assert (memory_of("a10"), memory_of("h100")) == (24 * GB, 80 * GB)
    assert memory_of("cpu") == memory_of("nvidia-gb10") == 0


@pytest.mark.parametrize(
    ("reported_mib", "size"),
    [
        # as nvidia-smi shows them, with ECC where it is the default
        *((15356, "16 GB"), (23028, "24 GB"), (46068, "48 GB"), (81559, "80 GB"), (81920, "80 GB"), (97871, "96 GB")),
        *((143771, "141 GB"), (183359, "180 GB"), (275040, "288 GB"), (11178, "11 GB"), (24220, "24 GB")),
        # other variants of a model, MIG slices, and a size that no vendor uses
        *((40960, "40 GB"), (32510, "32 GB"), (95830, "94 GB"), (4864, "5 GB"), (9984, "10 GB"), (22528, "22 GB")),
    ],
)
def test_memory_is_told_as_the_vendor_states_it(reported_mib: int, size: str) -> None:
    reported = reported_mib << 20
    assert memory_text(reported) == size
    assert memory_text(vendor_bytes(reported)) == size
    assert used_bytes_of(reported, reported) == vendor_bytes(reported)
    device = Device(uuid="", type="h100", memory_bytes=reported)
    assert memory_bytes(device) >= max(reported, vendor_bytes(reported))


def test_memory_that_no_driver_reports_is_that_of_the_type() -> None:
    assert memory_bytes(Device(uuid="", type="h100")) == 80 * GB
    assert (memory_text(0), memory_text(200 << 20)) == ("?", "0.2 GB")


# ---------------------------------------------------------------- simulated


def test_simulated_devices_have_ids_types_and_plausible_memory() -> None:
    found = take_inventory(simulate="A10G:2, h100 : 1", cpu_slots=5)
    assert [device.uuid for device in found.devices] == ["SIM-a10-0", "SIM-a10-1", "SIM-h100-0"]
    assert [device.index for device in found.devices] == [0, 1, 0]
    assert [device.type for device in found.devices] == ["a10", "a10", "h100"]
    assert all(device.simulated and device.used_bytes is None for device in found.devices)
    assert all(device.utilization_pct is None and device.outside_use is None for device in found.devices)
    assert found.devices[2].memory_bytes == 80 * GB
    assert found.cpu_slots == 5
    assert found.cores >= 1
    assert found.host
    assert found.problem is None


# ---------------------------------------------------------------- real


def test_four_idle_a10s(nvml_stub: Stub) -> None:
    found = inventory(nvml_stub())
    assert [device.uuid for device in found.devices] == [nvml.gpu_uuid(number) for number in range(4)]
    first = found.devices[0]
    assert (first.type, first.name, first.memory_bytes) == ("a10", "NVIDIA A10", nvml.A10_BYTES)
    assert (first.used_bytes, first.utilization_pct) == (0, 0.0)
    assert all(device.outside_use is None and not device.simulated for device in found.devices)
    assert (found.problem, found.cpu_slots) == (None, 16)


def test_devices_stand_in_the_order_of_the_pci_bus(nvml_stub: Stub) -> None:
    gpus = [nvml.StubGpu(nvml.gpu_uuid(number), bus=bus) for number, bus in enumerate([0x41, 0x1, 0xC1])]
    found = inventory(nvml_stub(gpus))
    assert [device.uuid for device in found.devices] == [nvml.gpu_uuid(number) for number in (1, 0, 2)]
    assert [device.index for device in found.devices] == [0, 1, 2]


def test_every_gpu_is_listed_whatever_its_name(nvml_stub: Stub) -> None:
    names = ["Graphics Device", "NVIDIA", "Orin (nvgpu)", "NVIDIA H200"]
    gpus = [nvml.StubGpu(nvml.gpu_uuid(number), name, bus=number) for number, name in enumerate(names)]
    types = [device.type for device in inventory(nvml_stub(gpus)).devices]
    assert len(types) == 4
    assert types[3] == "h200"
    assert [canonical_type(kind) for kind in types] == types


def test_memory_of_others_counts_above_five_per_cent(nvml_stub: Stub) -> None:
    idle = nvml.StubGpu(nvml.gpu_uuid(0), bus=1, used_bytes=nvml.A10_BYTES // 25)
    busy = nvml.StubGpu(nvml.gpu_uuid(1), bus=2, used_bytes=7_200_000_000, utilization_pct=93)
    small = nvml.StubGpu(nvml.gpu_uuid(2), bus=3, memory_bytes=4 * GB)  # the driver's own share is 7 % of it
    found = inventory(nvml_stub([idle, busy, small]))
    assert [device.outside_use for device in found.devices] == [None, "7.2 of 24 GB are in use", None]
    assert found.devices[1].utilization_pct == 93.0


def test_a_foreign_process_is_outside_use_and_ours_is_not(nvml_stub: Stub, sleeper: tuple[int, int]) -> None:
    parent, child = sleeper
    gpus = [
        nvml.StubGpu(nvml.gpu_uuid(0), bus=1, used_bytes=9 * GB, processes=[nvml.StubProcess(child, 9 * GB)]),
        nvml.StubGpu(nvml.gpu_uuid(1), bus=2, processes=[nvml.StubProcess(child), nvml.StubProcess(parent)]),
        nvml.StubGpu(nvml.gpu_uuid(2), bus=3),
    ]
    environ = nvml_stub(gpus)
    assert [device.outside_use for device in inventory(environ).devices] == [
        f"process {child} of user {me()} uses it",
        f"process {child} of user {me()} and 1 more use it",
        None,
    ]
    # descendants of the parent count as ours; the child's pid alone does not include its parent
    assert [device.outside_use for device in inventory(environ, [parent]).devices] == [None, None, None]
    assert [device.outside_use for device in inventory(environ, [child]).devices] == [
        None,
        f"process {parent} of user {me()} uses it",
        None,
    ]


def test_a_notebook_that_uses_a_gpu_is_named_as_such(nvml_stub: Stub) -> None:
    command = [sys.executable, "-c", "input()", "-m", "ipykernel_launcher"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as notebook:
        processes = [nvml.StubProcess(notebook.pid)]
        (device,) = inventory(nvml_stub([nvml.StubGpu(nvml.gpu_uuid(0), processes=processes)])).devices
        notebook.communicate(b"\n")
    assert device.outside_use == f"process {notebook.pid} of user {me()}, a notebook's kernel, uses it"


def test_a_process_that_has_ended_is_no_use_unless_it_may_be_the_hosts(nvml_stub: Stub) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    processes = [nvml.StubProcess(gone.pid)]
    (device,) = inventory(nvml_stub([nvml.StubGpu(nvml.gpu_uuid(0), processes=processes)])).devices
    in_container = os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC
    assert device.outside_use == (f"process {gone.pid} outside this container uses it" if in_container else None)


@pytest.mark.needs_root
@pytest.mark.skipif(os.getuid() != 0, reason="a pid namespace needs root")
def test_in_a_container_a_pid_of_the_host_is_outside_use(nvml_stub: Stub, tmp_path: Path) -> None:
    processes = [nvml.StubProcess(4_000_000)]
    environ = os.environ | nvml_stub([nvml.StubGpu(nvml.gpu_uuid(0), processes=processes)])
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", TAKE, ""]
    done = subprocess.run(command, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    if done.returncode and b"unshare" in done.stderr:
        pytest.skip(f"no pid namespace here: {done.stderr.decode().strip()}")
    (device,) = msgspec.json.decode(done.stdout, type=Inventory).devices
    assert device.outside_use == "process 4000000 outside this container uses it"


@pytest.mark.parametrize("name", ["nvidia-cuda-mps-server", "Xorg", "nv-hostengine", "gnome-shell"])
def test_a_process_of_the_system_does_not_use_a_gpu(nvml_stub: Stub, tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as process:
        try:
            eventually(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == name[:15], 5, "the program")
            # above the threshold for an idle GPU
            held = [nvml.StubProcess(process.pid, 3 * GB)]
            gpus = [nvml.StubGpu(nvml.gpu_uuid(0), used_bytes=3 * GB, processes=held)]
            (idle,) = inventory(nvml_stub(gpus)).devices
            gpus = [nvml.StubGpu(nvml.gpu_uuid(0), used_bytes=6 * GB, processes=held)]
            (busy,) = inventory(nvml_stub(gpus)).devices
        finally:
            process.kill()
    assert idle.outside_use is None
    assert busy.outside_use.endswith("are in use")


def test_mig_slices_are_devices_of_their_own(nvml_stub: Stub, sleeper: tuple[int, int]) -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    slices = [
        nvml.StubSlice("MIG-11111111-0000-0000-0000-000000000000", name, 5 * GB),
        nvml.StubSlice("MIG-22222222-0000-0000-0000-000000000000", name, 5 * GB, GB, [nvml.StubProcess(sleeper[0])]),
    ]
    gpus = [
        nvml.StubGpu(nvml.gpu_uuid(0), "NVIDIA A100-SXM4-40GB", bus=1, utilization_pct=None, slices=slices),
        nvml.StubGpu(nvml.gpu_uuid(1), "NVIDIA A100-SXM4-40GB", bus=2),
    ]
    found = inventory(nvml_stub(gpus))
    assert [device.uuid for device in found.devices] == [slices[0].uuid, slices[1].uuid, nvml.gpu_uuid(1)]
    assert [device.index for device in found.devices] == [0, 1, 2]
    first, second, _ = found.devices
    assert (first.type, first.name, first.memory_bytes) == ("a100-1g.5gb", name, 5 * GB)
    assert (first.used_bytes, first.utilization_pct, first.outside_use) == (0, None, None)
    assert second.outside_use == f"process {sleeper[0]} of user {me()} uses it"
    assert found.problem is None


@pytest.mark.parametrize(
    ("variables", "numbers"),
    [
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "2,5"}, [2, 5]),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": f"{nvml.gpu_uuid(6)},{nvml.gpu_uuid(1)}"}, [1, 6]),
        ({"PBS_JOBID": "7.host", "CUDA_VISIBLE_DEVICES": ""}, []),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "3,NoDevFiles"}, [3]),
        ({"SLURM_JOB_ID": "7"}, range(8)),
        # set by a user for one program
        ({"CUDA_VISIBLE_DEVICES": "2,5"}, range(8)),
    ],
)
def test_in_a_job_the_assigned_gpus_are_the_pools(
    nvml_stub: Stub, variables: dict[str, str], numbers: Sequence[int]
) -> None:
    found = inventory(nvml_stub(nvml.a10s(8)) | variables)
    assert [device.uuid for device in found.devices] == [nvml.gpu_uuid(number) for number in numbers]
    assert found.problem is None


def test_gpus_without_a_device_file_are_not_the_pools(nvml_stub: Stub, tmp_path: Path) -> None:
    for name in ("nvidiactl", "nvidia0", "nvidia3"):
        (tmp_path / name).touch()
    code = (
        "import sys, msgspec\nfrom pathlib import Path\nfrom sgpu_magic.agent.watch import inventory, nvml\n"
        "devices, problem = inventory._Reader(nvml.open_nvml(), frozenset(), {}, Path(sys.argv[1])).read()\n"
        "assert not problem, problem\nprint(*(device.uuid for device in devices))"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | nvml_stub(nvml.a10s(4))
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [nvml.gpu_uuid(0), nvml.gpu_uuid(3)]


def test_mig_mode_without_slices_is_said(nvml_stub: Stub) -> None:
    found = inventory(nvml_stub([nvml.StubGpu(nvml.gpu_uuid(0), "NVIDIA H100 80GB HBM3", slices=[])]))
    assert found.devices == ()
    assert "is in MIG mode but has no slices" in found.problem
    assert "nvidia-smi -mig 0" in found.problem


def test_what_the_driver_does_not_tell_is_none(nvml_stub: Stub) -> None:
    untold = {
        "nvmlDeviceGetMemoryInfo": 3,
        "nvmlDeviceGetMemoryInfo_v2": 3,
        "nvmlDeviceGetComputeRunningProcesses_v3": 3,
        "nvmlDeviceGetUtilizationRates": 999,
    }
    found = inventory(nvml_stub([nvml.StubGpu(nvml.gpu_uuid(0), used_bytes=9 * GB)], failures=untold))
    (device,) = found.devices
    assert (device.memory_bytes, device.used_bytes, device.utilization_pct) == (0, None, None)
    assert (device.outside_use, found.problem) == (None, None)


def test_an_older_driver_counts_its_own_share_as_used(nvml_stub: Stub) -> None:
    gpu = nvml.StubGpu(nvml.gpu_uuid(0), used_bytes=GB, reserved_bytes=GB // 2)
    (device,) = inventory(nvml_stub([gpu], failures={"nvmlDeviceGetMemoryInfo_v2": 13})).devices
    assert device.used_bytes == GB + GB // 2


def test_a_driver_too_old_for_the_package_is_a_problem_and_the_devices_are_still_there(
    nvml_stub: Stub,
) -> None:
    found = inventory(nvml_stub(failures=nvml.LIBRARY_MISMATCH))
    assert len(found.devices) == 4
    assert found.problem == (
        "The processes that use the GPUs can't be listed: the NVIDIA driver is older than the package "
        "nvidia-ml-py expects; update the driver, or install an older nvidia-ml-py."
    )


def test_a_lost_gpu_is_named_and_the_others_are_listed(nvml_stub: Stub) -> None:
    gpus = [nvml.StubGpu(nvml.gpu_uuid(0), bus=1, error=15), nvml.StubGpu(nvml.gpu_uuid(1), bus=2)]
    found = inventory(nvml_stub(gpus))
    assert [(device.uuid, device.index) for device in found.devices] == [(nvml.gpu_uuid(1), 0)]
    assert found.problem.startswith("GPU 0 (NVML's number) can't be read: it has fallen off the bus; reset it")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (18, "have different versions, as after an update; reboot, or reload the driver."),
        (4, "this user has no permission to open them; ask the administrator for access to /dev/nvidia*."),
        (999, "NVML returned error 999; see the output of `nvidia-smi`."),
    ],
)
def test_a_driver_that_can_not_be_opened_is_a_problem(nvml_stub: Stub, code: int, words: str) -> None:
    found = inventory(nvml_stub(failures={"nvmlInitWithFlags": code}))
    assert found.devices == ()
    assert found.problem.startswith("The GPUs can't be listed: ")
    assert found.problem.endswith(words)


def test_devices_change_while_a_machine_runs(nvml_stub: Stub) -> None:
    environ = nvml_stub(nvml.a10s(1))
    assert len(inventory(environ).devices) == 1
    nvml.change(environ, nvml.a10s(3))
    assert len(inventory(environ).devices) == 3


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
def test_a_machine_without_driver_has_no_devices_and_no_problem() -> None:
    found = take_inventory(simulate="", cpu_slots=2)
    assert (found.devices, found.problem) == ((), None)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
def test_a_library_without_driver_and_gpu_is_no_problem(nvml_stub: Stub) -> None:
    found = inventory(nvml_stub(failures={"nvmlInitWithFlags": 9}))
    assert (found.devices, found.problem) == ((), None)


def test_nvml_is_loaded_only_when_it_is_asked() -> None:
    code = (
        "import sys; from sgpu_magic.agent.watch.inventory import take_inventory;"
        "take_inventory(simulate='a10:1', cpu_slots=1); sys.exit('pynvml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode == 0


KEEP = """
import asyncio, functools, sys
from sgpu_magic.agent.watch import inventory

async def main():
    inventory.KEPT_OPEN_S = 0.2
    kept = inventory.NvmlSession()
    for _ in sys.stdin:
        found = await kept.during(functools.partial(inventory.take_inventory, simulate="", cpu_slots=1))
        print(len(found.devices), flush=True)
    await asyncio.sleep(30)

asyncio.run(main())
"""


def test_nvml_stays_open_for_a_while_after_an_inventory(nvml_stub: Stub) -> None:
    environ = nvml_stub(devices=nvml.a10s(2))
    with subprocess.Popen(
        [sys.executable, "-c", KEEP],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        for _ in range(2):
            keeper.stdin.write("take\n")
            keeper.stdin.flush()
            assert keeper.stdout.readline() == "2\n"
            # only once: the inventory has closed its own handle again
            assert nvml.times_open(environ, keeper.pid) == 1
        keeper.stdin.close()
        eventually(lambda: nvml.times_open(environ, keeper.pid) == 0, 5, "NVML closed")
        keeper.kill()


# ---------------------------------------------------------------- how the GPUs are connected


def test_distances_are_those_of_the_topology_in_bus_order(nvml_stub: Stub) -> None:
    # NVML lists them in another order than the bus; 0 and 2, 1 and 3 are pairs with NVLink
    ids = [nvml.gpu_uuid(number) for number in range(4)]
    ends = [[(ids[1], 50, False), (ids[2], 30, True), (ids[3], 50, False)], [(ids[2], 50, False), (ids[3], 30, True)]]
    ends += [[(ids[3], 40, False)], []]
    gpus = [nvml.StubGpu(ids[at], bus=at + 1, links=links) for at, links in enumerate(ends)]
    found = inventory(nvml_stub(devices=[gpus[2], gpus[0], gpus[3], gpus[1]])).devices
    assert [device.uuid for device in found] == ids
    assert [device.distances for device in found] == [(0, 50, 0, 50), (50, 0, 50, 0), (0, 50, 0, 40), (50, 0, 40, 0)]


@pytest.mark.parametrize("code", [3, 13, 15], ids=["not supported", "old driver", "lost GPU"])
def test_distances_that_the_driver_does_not_tell_are_unknown(nvml_stub: Stub, code: int) -> None:
    gpus = nvml.a10s(2)
    linked = [nvml.StubGpu(gpus[0].uuid, links=[(gpus[1].uuid, 20, False)]), gpus[1]]
    found = inventory(nvml_stub(devices=linked, failures={"nvmlDeviceGetTopologyCommonAncestor": code}))
    assert [device.distances for device in found.devices] == [(), ()]
    assert not found.problem
    shown = inventory(nvml_stub(devices=linked, failures={"nvmlDeviceGetP2PStatus": code})).devices
    assert [device.distances for device in shown] == ([(0, 20), (20, 0)] if code != 15 else [(), ()])
