"""The kernel that a module's tests share: what a failed test has left running ends before the next one begins."""

from __future__ import annotations

from queue import Empty

from kernels import Home, Kernel, eventually

_ANSWERS_S = 5.0
_ENDS_S = 20.0


class OneKernel:
    """A kernel with the extension loaded and a warm pool. It never uses CUDA itself.

    Args:
        home: Its home.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._kernel: Kernel | None = None

    def get(self) -> Kernel:
        """The kernel; another one where the last can't be used any more."""
        if self._kernel is None:
            self._kernel = made = Kernel(self._home)
            # the first CUDA context on a machine takes seconds
            made.check("%%distributed -n 1 --ui none\nimport torch\ntorch.ones(1, device=device)", 120)
            # pyzmq starts a thread of its own with the first large message
            made.check("print('x' * 200_000)")
            self._home.check_leaks()
        return self._kernel

    def settle(self) -> None:
        """End a cell that still runs, the session with its ranks, and the kernel itself if nothing else helps."""
        if self._kernel is None:
            return
        if not self._answers():
            if self._kernel._manager.is_alive():
                self._kernel.interrupt()
            if not self._answers():
                self.close()
                return
        if self._home.rank_pids():
            self._kernel.run("%sgpu_disconnect")
            eventually(lambda: not self._home.rank_pids(), _ENDS_S, "no rank is left")

    def close(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()

    def _answers(self) -> bool:
        assert self._kernel is not None
        if not self._kernel._manager.is_alive():
            return False
        try:
            self._kernel.client.kernel_info(reply=True, timeout=_ANSWERS_S)
        except (TimeoutError, Empty):
            return False
        return True
