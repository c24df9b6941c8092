"""Homes with a pool and a kernel that the modules of one test process share, as each takes five seconds of CPU time.

SharedHomes   one home for all modules with the same `HOME_VARIABLES`
SharedKernel  its kernel, whose state is restored after each test
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from queue import Empty

from kernels import Home, Kernel

# homes with variables that are kept at the same time: each takes a few hundred megabytes
_KEPT = 1
_REMEMBER = """
import os, sys
umask = os.umask(0o022)
os.umask(umask)
shell.remembered = dict(os.environ), list(sys.path), os.getcwd(), umask, set(shell.user_ns)
"""
_RESTORE = """
import os, sys
environ, path, cwd, umask, _ = shell.remembered
for name in set(os.environ) - set(environ):
    del os.environ[name]
os.environ.update(environ)
sys.path[:] = path
os.chdir(cwd)
os.umask(umask)
"""
_FORGET = """
*_, names = shell.remembered
for name in [name for name in shell.user_ns if not name.startswith("_") and name not in names]:
    del shell.user_ns[name]
# where a cell has set them IPython leaves them alone from then on
for name in ("_", "__", "___"):
    shell.user_ns[name] = getattr(shell.displayhook, name)
for number in list(shell.user_ns["Out"]):
    del shell.user_ns["Out"][number]
    shell.user_ns.pop(f"_{number}", None)
# ipykernel closes the sockets of threads that have ended every 10 s; until then they would count as a leak
printing = shell.kernel.iopub_thread
printing.io_loop.add_callback(printing._event_pipe_gc)
"""


class SharedKernel:
    """A kernel with the extension loaded and a warm pool in a home.

    Args:
        home: Its home.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._kernel: Kernel | None = None

    def get(self) -> Kernel:
        """Return the kernel, a new one if a test has ended the last."""
        if self._kernel is not None and not self._kernel.is_alive():
            self.close()
        if self._kernel is None:
            made = self._kernel = Kernel(self._home)
            made.check("%%distributed -n 2 --ui none\npass")
            # pyzmq starts a thread of its own with the first large message
            made.check("print('x' * 200_000)")
            self._do(_REMEMBER)
            self._home.check_leaks()
        return self._kernel

    def restore(self) -> None:
        """Undo a test's changes to the kernel's environment, import path and directory."""
        self._do_if_it_can(_RESTORE)

    def forget(self) -> None:
        """Remove the names that a module's tests have set."""
        self._do_if_it_can(_FORGET)

    def close(self) -> None:
        if self._kernel is not None:
            kernel, self._kernel = self._kernel, None
            kernel.close()

    def _do_if_it_can(self, code: str) -> None:
        if self._kernel is None or not self._kernel.is_alive():
            return
        try:
            # where MLflow has been imported, runs go to the notebook's own store from then on
            if self._kernel.value("hasattr(get_ipython(), 'remembered') and 'mlflow' not in __import__('sys').modules"):
                self._do(code)
            else:
                # or a test has restarted it
                self.close()
        except Empty:
            # still busy with a cell of the test before
            self.close()

    def _do(self, code: str) -> None:
        assert self._kernel is not None
        # this leaves no trace in the history, the outputs and the execution count
        self._kernel.value(f"exec({code!r}, {{'shell': get_ipython()}})")


class SharedHomes:
    """One home for all modules with the same variables. A home stays until one with other variables is requested."""

    def __init__(self) -> None:
        self._homes: dict[frozenset[tuple[str, str]], Home] = {}
        self._kernels: dict[Home, SharedKernel] = {}

    def get(self, variables: Mapping[str, str] | None) -> Home:
        """Return the home with these variables for another module, without remains of a failed test."""
        key = frozenset((variables or {}).items())
        home = self._homes.pop(key, None)
        if home is not None and home.unexpected():
            # the test that left it has failed already
            with contextlib.suppress(AssertionError):
                self._close(home)
            home = None
        if home is None:
            home = Home(variables)
        home.begin_module()
        others = [found for found in self._homes if found]
        for old in others[: max(0, len(others) - _KEPT + 1)] if key else ():
            self._close(self._homes.pop(old))
        # the most recently requested home is closed last
        self._homes[key] = home
        return home

    def kernel(self, home: Home) -> SharedKernel | None:
        """Return the home's kernel, None if the home is not one of these."""
        if home not in self._homes.values():
            return None
        return self._kernels.setdefault(home, SharedKernel(home))

    def close(self) -> None:
        """Close all homes and check that nothing is left of them."""
        faults: list[BaseException] = []
        for home in self._homes.values():
            try:
                self._close(home)
            except AssertionError as error:
                faults.append(error)
        if faults:
            raise ExceptionGroup("shared homes", faults)

    def _close(self, home: Home) -> None:
        kernel = self._kernels.pop(home, None)
        if kernel is not None:
            kernel.close()
        home.close()
