"""A notebook on one machine and its ranks on another one, which has other packages and sees none of its files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib import metadata

import pytest
from kernels import Kernel
from two_machines import TwoMachines, two_machines

MARKUPSAFE = f"markupsafe=={metadata.version('markupsafe')}"

pytestmark = pytest.mark.needs_root


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("needs root and ip(8) for a network namespace")
    folder = tmp_path_factory.mktemp("machines")
    # this environment has its own markupsafe: changing a linked one would change the tests' environment
    notebook = ("six==1.16.0", "toolz==0.12.1", "colorama==0.4.6", MARKUPSAFE)
    with two_machines(folder, notebook=notebook, node=("six==1.17.0", "toolz==1.0.0")) as made:
        made.fill_cache_for_notebook()
        made.start_pool()
        yield made


@pytest.fixture
def kernel(machines: TwoMachines) -> Iterator[Kernel]:
    made = machines.kernel()
    yield made
    made.close()


@pytest.mark.slow
def test_ranks_have_the_notebooks_packages_and_the_nodes_torch(machines: TwoMachines, kernel: Kernel):
    (machines.home.work / "helpers.py").write_text("def double(value):\n    return 2 * value\n")
    reply = kernel.check(
        "%%distributed -n 2 --out where\n"
        "import colorama, helpers, os, six, sys, toolz, torch\n"
        "print(six.__version__, toolz.__version__, colorama.__version__, helpers.double(21))\n"
        "where = [os.getcwd(), sys.prefix, torch.__file__, os.readlink('/proc/self/ns/net')]\n",
        timeout_s=120,
    )
    for rank in (0, 1):
        assert "1.16.0 0.12.1 0.4.6 42" in reply.lines(rank), reply.story
    cwd, prefix, torch, network = kernel.value("where")
    assert cwd.startswith(str(machines.home.state / "runs"))
    assert prefix.startswith(str(machines.home.state / "environments"))
    assert torch.startswith(str(machines.home.state / "environments"))
    # its ranks really are in the other machine's network
    assert network != machines.network_of(kernel.pid)


@pytest.mark.slow
def test_a_package_that_was_changed_in_the_notebook_is_new_on_the_other_machine(machines: TwoMachines, kernel: Kernel):
    show = "%%distributed -n 2\nimport toolz, colorama\nprint(toolz.__version__)\n"
    assert "0.12.1" in kernel.check(show, timeout_s=120).lines(0)
    machines.install("toolz==0.12.0")
    try:
        kernel.check("import importlib; importlib.invalidate_caches()")
        assert "0.12.0" in kernel.check(show, timeout_s=120).lines(0)
        again = kernel.check(show, timeout_s=120)
        assert "0.12.0" in again.lines(0)
    finally:
        machines.install("toolz==0.12.1")


@pytest.mark.slow
def test_what_the_other_machine_can_not_have_is_an_error_in_the_cell(machines: TwoMachines, kernel: Kernel):
    machines.install("markupsafe==2.0.1")
    try:
        reply = kernel.run("%%distributed -n 2\npass\n", timeout_s=120)
    finally:
        machines.install(MARKUPSAFE)
    assert reply.status == "error", reply.story
    assert re.search(r"EnvironmentFailed|RemoteError|Failed", reply.ename), reply.ename
