"""A kernel whose environment has an older version of the package, and one with this version, in one state directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from homes import Home
from kernels import Kernel
from older_package import OLDER_PROTOCOL, OLDER_VERSION, older_environment, upgrade
from waiting import eventually

from sgpu_magic import __version__
from sgpu_magic.wire.pool_status import PROTOCOL_VERSION

OWN_HOME = True
ADD = "%%distributed -n 2\nnumber + rank"
UNTIL_GO = "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.02)\nrank"


@pytest.mark.slow
def test_kernels_of_two_versions_replace_the_idle_pool_and_leave_a_busy_one_alone(
    home: Home, kernel: Kernel, new_kernel: Callable[..., Kernel], tmp_path: Path
):
    python = older_environment(tmp_path / "older")
    older = new_kernel(python=str(python))
    assert older.value("__import__('sgpu_magic').__version__") == OLDER_VERSION
    for each in (kernel, older):
        each.check("number = 20")
    runs_soon(kernel)
    newer_pool = home.pool_pid()
    # the newer pool is idle, so the older kernel gets one of its own version
    runs_soon(older)
    assert home.pool_pid() not in (None, newer_pool)
    runs_soon(kernel)
    going = kernel.start(f"%%distributed -n 2 --name going\n{UNTIL_GO}")
    eventually(lambda: home.run_named("going"), 20, "the run is recorded")
    refused = older.run(ADD)
    (home.work / "go").touch()
    assert (refused.status, refused.ename) == ("error", "PoolVersionError"), refused.story
    for word in (f"sgpu-magic {__version__}", f"protocol {PROTOCOL_VERSION}", f"speaks {OLDER_PROTOCOL}"):
        assert word in refused.evalue
    done = going.wait()
    assert done.status == "ok", done.story
    assert done.result.endswith("[0, 1]")
    upgrade(python)
    eventually(lambda: "it loaded" in older.run(ADD).evalue, 20, "the older kernel is asked to restart")
    reply = older.run(ADD)
    assert (reply.status, reply.ename) == ("error", "PoolVersionError"), reply.story
    assert f"it loaded {OLDER_VERSION}, and {__version__} is installed now. Restart the kernel" in reply.evalue
    runs_soon(kernel)


def runs_soon(kernel: Kernel) -> None:
    """Run a cell, as soon as no run of another kernel is about to leave the pool."""
    eventually(lambda: kernel.run(ADD).result.endswith("[20, 21]"), 20, "the kernel's cells run")
