"""Tests on real GPUs: skipped with the reason where there is none, and none of them leaves memory of a GPU in use.

`needs_gpu(2)` is skipped where there are fewer than two. `make test-gpu` runs these tests alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import real_gpus
from figures import Figures
from kernels import Home, Kernel, eventually
from one_kernel import OneKernel

from sgpu_magic.wire.devices import Device

_FIGURES = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before any fixture starts a pool."""
    marks = list(item.iter_markers("needs_gpu"))
    if marks and (reason := real_gpus.why_not(max(mark.args[0] if mark.args else 1 for mark in marks))):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def gpus() -> tuple[Device, ...]:
    """The machine's GPUs in bus order."""
    return real_gpus.at_start()


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    """The module's home: its pool lists the real GPUs, and no other module's pool is there."""
    made = Home(getattr(request.module, "HOME_VARIABLES", None))
    yield made
    made.close()


@pytest.fixture(scope="module")
def module_kernel(home: Home) -> Iterator[OneKernel]:
    """The module's kernel; use `kernel`."""
    made = OneKernel(home)
    yield made
    made.close()


@pytest.fixture
def kernel(module_kernel: OneKernel) -> Iterator[Kernel]:
    """A kernel with the extension loaded and a warm pool; the module's tests share it. It never uses CUDA itself."""
    yield module_kernel.get()
    module_kernel.settle()


@pytest.fixture
def cuda_kernel(home: Home) -> Iterator[Kernel]:
    """A kernel of its own for one test, which may use CUDA: its context ends with it."""
    made = Kernel(home)
    yield made
    made.close()


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, connected to one rank."""
    kernel.check("s = %sgpu_connect -n 1\ns.wait(60)", 90)
    yield kernel
    kernel.run("%sgpu_disconnect")
    kernel.check("globals().pop('s', None)")


@pytest.fixture(autouse=True)
def gpu_memory_is_given_back() -> Iterator[None]:
    """After each test, whatever it has killed, the GPUs hold no more than before the first one."""
    yield
    eventually(
        real_gpus.is_free,
        30,
        lambda: f"{real_gpus.used_bytes() / 1e6:.0f} MB are in use, {real_gpus.used_at_start() / 1e6:.0f} before",
        poll_s=0.2,
    )


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Iterator[Figures]:
    """Takes what was measured; written to GPU.md when every row is there, and shown in any case."""
    made = Figures()
    yield made
    pytestconfig.stash[_FIGURES] = made.write(Path(pytestconfig.rootpath, "tests", "benchmarks", "GPU.md"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if text := config.stash.get(_FIGURES, ""):
        terminalreporter.write_line(f"\n{text}")


@pytest.fixture
def go(home: Home) -> Iterator[Callable[[], None]]:
    """Lets ranks that wait for the file `go` in their directory end: `go()`. After a test none waits any more."""
    path = home.work / "go"
    yield path.touch
    path.touch()
    with contextlib.suppress(AssertionError):
        eventually(lambda: not home.rank_pids(), 10, "no rank waits")
    path.unlink()
