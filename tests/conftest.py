"""Fixtures of the end-to-end tests: a home, a kernel in it, and after each test the check for leaks."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from headless_notebooks import install_kernel
from kernels import Home, Kernel
from mlflow_stores import make_store
from npm_packages import copy_front_end
from shared_homes import SharedHomes, SharedKernel

from sgpu_magic.client import this_machine


def pytest_configure() -> None:
    # a shell that starts the tests in the background has their children ignore Ctrl-C
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # what takes longest comes first: the test processes end together
    items.sort(key=lambda item: ("unit" in item.path.parts, not _starts_ray(item.path), not _variables_of(item.path)))


def _starts_ray(path: Path) -> bool:
    return "unit" not in path.parts and ("ray" in path.stem or path.stem == "test_contract")


@functools.cache
def _variables_of(path: Path) -> str:
    """A module's `HOME_VARIABLES` as it writes them: the process that spreads the modules imports none of them."""
    text = path.read_text()
    for statement in ast.parse(text).body if "HOME_VARIABLES" in text else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id="HOME_VARIABLES")], value=value):
                return ast.unparse(value)
            case _:
                pass
    return ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    modules = _modules_of.setdefault(getattr(report, "worker_id", ""), {})
    module = report.nodeid.partition("::")[0]
    modules[module] = modules.get(module, False) or report.failed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how the order can be had again: modules share homes and kernels."""
    for modules in _modules_of.values():
        for failed in [module for module, has_failed in modules.items() if has_failed]:
            before = itertools.takewhile(lambda module, failed=failed: module != failed, modules)
            terminalreporter.write_line(f"before {failed} in its process: {' '.join(before) or 'nothing'}")
    terminalreporter.write_line(f"the order of the tests: --randomly-seed={config.getoption('randomly_seed', 'none')}")


# of each test process, in order: whether one of its tests has failed
_modules_of: dict[str, dict[str, bool]] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Spread modules over the test processes: those with the same home, MLflow or Ray clusters to the same one.

    An import of MLflow takes seconds. Ray gives a new node's processes a few seconds; two clusters that start at once
    on two cores do not keep to that.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByHome(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            path = config.rootpath / module
            if _starts_ray(path):
                return "ray"
            return "mlflow" if "tracking" in module else _variables_of(path) or module

    return ByHome(config, log)


@pytest.fixture(scope="session", autouse=True)
def settings_of_pytest_stay_here() -> Iterator[None]:
    """Send no settings of this process to ranks: pytest makes warnings errors, and has log handlers of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "read_settings", dict)
        yield


@pytest.fixture(scope="session")
def shared_homes() -> Iterator[SharedHomes]:
    """The homes of this test process."""
    made = SharedHomes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest, shared_homes: SharedHomes) -> Iterator[Home]:
    """A pool's home. Its `HOME_VARIABLES` are everybody's environment there.

    Modules with the same variables share it; a module that needs one for itself says `OWN_HOME = True`.
    """
    variables = getattr(request.module, "HOME_VARIABLES", None)
    if not getattr(request.module, "OWN_HOME", False):
        yield shared_homes.get(variables)
        return
    made = Home(variables)
    yield made
    made.close()


@pytest.fixture(scope="module")
def module_kernel(home: Home, shared_homes: SharedHomes) -> Iterator[SharedKernel]:
    """The home's kernel; use `kernel`."""
    shared = shared_homes.kernel(home)
    if shared is not None:
        yield shared
        shared.forget()
        return
    made = SharedKernel(home)
    yield made
    made.close()


@pytest.fixture
def kernel(home: Home, module_kernel: SharedKernel) -> Iterator[Kernel]:
    """A kernel with the extension loaded and a warm pool; the tests share it."""
    # what runs wait for in many tests
    (home.work / "go").unlink(missing_ok=True)
    yield module_kernel.get()
    module_kernel.restore()


@pytest.fixture(scope="module")
def neighbour(home: Home) -> Iterator[Kernel]:
    """Another notebook's kernel in the home; the module's tests share it, and none ends it."""
    made = SharedKernel(home)
    yield made.get()
    made.close()


@pytest.fixture
def new_kernel(home: Home) -> Iterator[Callable[..., Kernel]]:
    """Makes further kernels in the module's home: `new_kernel(load=True, variables={})`."""
    made: list[Kernel] = []

    def make(**options: object) -> Kernel:
        made.append(Kernel(home, **options))
        return made[-1]

    yield make
    for kernel in made:
        kernel.close()


@pytest.fixture
def environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """The home; this process's variables are its own: nbclient and papermill pass them on."""
    for name, value in home.environ.items():
        monkeypatch.setenv(name, value)
    install_kernel(home)
    return home


@pytest.fixture
def new_home() -> Iterator[Callable[..., Home]]:
    """Makes homes for this test alone: `new_home({"SGPU_SIMULATE": "a10:4"})`."""
    made: list[Home] = []

    def make(variables: dict[str, str] | None = None) -> Home:
        made.append(Home(variables))
        return made[-1]

    yield make
    for home in made:
        home.close()


@pytest.fixture(scope="session")
def coming_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Path]]:
    """`empty_store` while it is made: for what can be started meanwhile."""
    own = tmp_path_factory.getbasetemp()
    with ThreadPoolExecutor(1) as executor:
        shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
        yield executor.submit(make_store, shared / "empty-store")


@pytest.fixture(scope="session", autouse=True)
def store_comes_early(request: pytest.FixtureRequest) -> None:
    """Where several test processes share the store, the first begins it at once; no set-up waits for all of it."""
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        request.getfixturevalue("coming_store")


@pytest.fixture(scope="session")
def empty_store(coming_store: Future[Path]) -> Path:
    """The database of a new default MLflow store, one for all test processes; `mlflow_stores` copies it."""
    return coming_store.result()


@pytest.fixture(scope="session")
def front_end(pytestconfig: pytest.Config) -> Path:
    """A copy of the front end's sources with the packages of the lock file."""
    return copy_front_end(Path(pytestconfig.rootpath, ".pytest_cache", "front_end"))


@pytest.fixture(scope="session")
def view_builder(pytestconfig: pytest.Config) -> Path:
    """The same with no more than what builds the views."""
    return copy_front_end(Path(pytestconfig.rootpath, ".pytest_cache", "front_end"), only=("esbuild", "preact"))


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that has a home: no process, thread, descriptor or memory file more than before."""
    yield
    if "home" in request.fixturenames:
        # kernels of this one test may be dead already or are closed after this check
        request.getfixturevalue("home").check_leaks()
