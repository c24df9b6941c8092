"""Remedies that errors name are followed in the notebook that has read them: the next cell works."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from examples import first_rows
from kernels import Home, Kernel, Reply, eventually

from sgpu_magic.files.run_directory import why_no_run

OWN_HOME = True

_SETTING = re.compile(r"\b(SGPU_[A-Z_]+=\S+?)[,.]?(?=\s)")
_OPTION = re.compile(r"(?<=[Uu]se )--(gpus|type) (\w+)|(?<=with )--(gpus|type) (\w+)")
_LEFT_OUT = re.compile(r"[Ll]eave --(\w+) out")
_COMMAND = re.compile(r"`sgpu ([^`]+)`")


def remedies(error: str, cell: str) -> list[tuple[str, str]]:
    """The remedies that an error names, each as a cell to run first ("" for none) and what the failed cell becomes."""
    found = [(f"%env {setting}", cell) for setting in _SETTING.findall(error)]
    for match in _OPTION.finditer(error):
        name, value = (text for text in match.groups() if text)
        without = re.sub(rf" --{name} \w+", "", cell)
        found.append(("", without.replace("%%distributed", f"%%distributed --{name} {value}")))
    found += [("", re.sub(rf"--{name} \w+ ?", "", cell)) for name in _LEFT_OUT.findall(error)]
    # the kernel's environment may not be on PATH
    return found + [(f"!{sys.executable} -m sgpu_magic.cli {words}", cell) for words in _COMMAND.findall(error)]


def refused(kernel: Kernel, cell: str) -> str:
    reply = kernel.run(cell)
    assert reply.status == "error", reply.story
    return " ".join(reply.evalue.split())


def ran(reply: Reply, ranks: int, device: str) -> None:
    assert reply.status == "ok", reply.story
    assert [reply.lines(rank) for rank in range(ranks)] == [[device]] * ranks, reply.story


def follow(kernel: Kernel, error: str, places: dict[str, Path]) -> None:
    """Do what an error about a pool's place says, in its order."""
    output = sorted(
        (error.index(word), cell)
        for word, cell in (
            ("`sgpu pool stop`", f"!{sys.executable} -m sgpu_magic.cli pool stop"),
            *((f"set {name}", f"%env {name}={path}") for name, path in places.items()),
            *((f"Set {name}", f"%env {name}={path}") for name, path in places.items()),
            ("%reload_ext sgpu_magic", "%reload_ext sgpu_magic"),
        )
        if word in error
    )
    assert len(output) > 1, error
    for _, cell in output:
        kernel.check(cell)


@pytest.fixture
def plain_pool(kernel: Kernel) -> Kernel:
    """A kernel and a pool without simulated devices that is up."""
    kernel.check("%env SGPU_SIMULATE=")
    # a test before may have left the client with other directories
    kernel.check("%reload_ext sgpu_magic")
    kernel.check("%%distributed -n 1\npass")
    return kernel


_FOR_A_MISSING_TYPE = ["%env SGPU_STAND_IN=cpu", "%env SGPU_SIMULATE=a10:8", ""]


@pytest.mark.parametrize("remedy", first_rows([(each,) for each in _FOR_A_MISSING_TYPE], 1))
def test_each_remedy_for_a_missing_type_works_in_the_same_notebook(plain_pool: Kernel, remedy: str):
    cell = "%%distributed --gpus 4 --type a10\nprint(device)"
    error = refused(plain_pool, cell)
    named = dict(remedies(error, cell))
    assert list(named) == _FOR_A_MISSING_TYPE, error
    plain_pool.check(remedy)
    ran(plain_pool.run(named[remedy]), 4, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["--gpus 8 --type a10", "--gpus 8", "--gpus 4 --type h100", "--gpus 2 --type a10 --min-memory 40GB"]
)
def test_each_remedy_for_too_few_devices_works_in_the_same_notebook(plain_pool: Kernel, options: str):
    kernel = plain_pool
    kernel.check('%env SGPU_SIMULATE="a10:4,h100:2"')
    cell = f"%%distributed {options}\nprint(device)"
    error = refused(kernel, cell)
    named = remedies(error, cell)
    assert named, error
    for first, then in named:
        kernel.check(first)
        reply = kernel.run(then)
        assert reply.status == "ok", f"{error}\n{then}\n{reply.story}"


@pytest.mark.slow
def test_another_notebooks_simulation_is_named_once(home: Home, new_kernel: Callable[..., Kernel]):
    setter, other = (new_kernel(variables={"JPY_SESSION_NAME": f"/work/{name}.ipynb"}) for name in ("train", "eval"))
    setter.check("%env SGPU_SIMULATE=a10:2")
    cell = "%%distributed -n 1 --ui text\npass"
    note = "simulates a10:2, because train.ipynb started it with SGPU_SIMULATE"
    assert note not in setter.check(cell).text
    reported = other.check(cell).text
    assert note in reported
    assert note not in other.check(cell).text
    ((stop, _),) = remedies(reported, cell)
    other.check(stop)
    assert "(simulated on cpu)" not in other.check(cell).text


@pytest.mark.slow
def test_a_pool_in_use_keeps_its_settings_and_the_error_names_the_command(
    plain_pool: Kernel, new_kernel: Callable[..., Kernel]
):
    kernel = plain_pool
    other = new_kernel()
    going = other.start(
        "%%distributed -n 1 --name steady\nimport time, os\nwhile not os.path.exists('go'): time.sleep(0.02)"
    )
    eventually(lambda: kernel.home.run_named("steady"))
    kernel.check("%env SGPU_SIMULATE=a10:8")
    cell = "%%distributed --gpus 4 --type a10\nprint(device)"
    error = refused(kernel, cell)
    assert "still has SGPU_SIMULATE='' instead of 'a10:8', because it is in use" in error
    assert "(steady)" in error, error
    reply = kernel.check("%%distributed -n 1\nprint(device)")
    assert "still has SGPU_SIMULATE='' instead of 'a10:8'" in reply.text
    (first, then) = remedies(error, cell)[-1]
    assert first.endswith("pool stop --force")
    kernel.check(first)
    assert going.wait().status == "error"
    ran(kernel.run(then), 4, "cpu")


def test_code_for_cuda_on_ranks_that_stand_in_says_what_runs_on_both(plain_pool: Kernel):
    kernel = plain_pool
    kernel.check("%env SGPU_STAND_IN=cpu")
    reply = kernel.run("%%distributed --gpus 2 --type a10\nimport torch\nprint(torch.ones(2).to('cuda').sum().item())")
    assert reply.status == "error"
    assert "use `device`" in reply.traceback, reply.story
    ran(
        kernel.run("%%distributed --gpus 2 --type a10\nimport torch\nprint(torch.ones(2).to(device).sum().item())"),
        2,
        "2.0",
    )


def test_a_name_that_can_not_leave_the_notebook_is_kept_out_as_the_error_says(plain_pool: Kernel):
    kernel = plain_pool
    kernel.check("import threading\nguard = threading.Lock()")
    cell = "%%distributed -n 2\nprint(device)\nif rank > 5:\n    guard.acquire()"
    error = refused(kernel, cell)
    (option,) = re.findall(r"with (--exclude \w+)", error)
    ran(kernel.run(cell.replace("-n 2", f"-n 2 {option}")), 2, "cpu")


@pytest.mark.parametrize("bad", [pytest.param(each, marks=pytest.mark.slow) for each in ("too long", "a link")])
def test_a_pools_place_that_is_none_is_changed_as_the_error_says(new_home: Callable[..., Home], bad: str):
    home = new_home({})
    odd_path = home.work / ("x" * 120)
    if bad == "a link":
        odd_path = home.work / "link"
        odd_path.symlink_to("/tmp")
    kernel = Kernel(home, variables={"SGPU_RUNTIME_DIR": str(odd_path)})
    try:
        error = refused(kernel, "%%distributed -n 1\nprint(device)")
        follow(kernel, error, {"SGPU_RUNTIME_DIR": home.work / "r"})
        ran(kernel.run("%%distributed -n 1\nprint(device)"), 1, "cpu")
        assert (home.work / "r" / "pool.sock").exists()
        kernel.check(f"!{sys.executable} -m sgpu_magic.cli pool stop --force")
    finally:
        kernel.close()


@pytest.mark.slow
def test_runs_go_to_another_disk_as_the_error_of_a_full_one_says(plain_pool: Kernel):
    kernel = plain_pool
    there = kernel.home.work / "another disk"
    follow(kernel, why_no_run(kernel.home.state / "runs", "No space left on device"), {"SGPU_STATE_DIR": there})
    ran(kernel.run("%%distributed -n 1\nprint(device)"), 1, "cpu")
    assert str(there) in kernel.check("print(_.directory, _.logs(0).read_text())").text
    # stop that directory's pool; this home's pool is another one
    kernel.check(f"!{sys.executable} -m sgpu_magic.cli pool stop --force")
    assert [path for path in (there / "runs").iterdir() if not path.name.startswith(".")]


def test_a_pool_stops_as_soon_as_the_ranks_of_ended_runs_have_left(plain_pool: Kernel):
    kernel = plain_pool
    kernel.check("%%distributed -n 1\nimport atexit, time\natexit.register(time.sleep, 1)")
    assert "is stopped" in kernel.check(f"!{sys.executable} -m sgpu_magic.cli pool stop").text


@pytest.mark.slow
def test_a_second_state_directory_gets_a_pool_of_its_own_as_the_refusal_says(plain_pool: Kernel, tmp_path: Path):
    kernel = plain_pool
    kernel.check("%%distributed -n 1 --detach\nimport os, time\nwhile not os.path.exists('go'): time.sleep(0.02)")
    kernel.check(f"%env SGPU_STATE_DIR={kernel.home.work / 'another disk'}")
    kernel.check("%reload_ext sgpu_magic")
    refused = kernel.run("%%distributed -n 1\nprint(device)")
    assert refused.ename == "PoolError", refused.story
    assert "SGPU_RUNTIME_DIR" in refused.evalue
    kernel.check(f"%env SGPU_RUNTIME_DIR={tmp_path}")
    kernel.check("%reload_ext sgpu_magic")
    kernel.check("%%distributed -n 1\nprint(device)")
    assert "cpu" in kernel.check("print(_.logs(0).read_text())").text
    kernel.check(f"!{sys.executable} -m sgpu_magic.cli pool stop --force")
    (kernel.home.work / "go").touch()
