"""A process-group backend that behaves like NCCL where gloo differs, for tests without GPUs.

`SOURCE` is code for a cell: it registers the backend `nccl_manners` and defines `behave(...)`. The group that
`dist.init_process_group("nccl_manners")` then makes blocks in every collective until all ranks have called it, as gloo
does underneath. Set before a collective, `behave` chooses what happens in it:

blocks     the collective waits in C, where no signal ends it, until the group is aborted; then it returns, without an
           error, and leaves NaN in the tensor
holds      the same, while the collective holds the GIL, so that nothing can abort it
hangs      the abort never returns
tears_down the abort ends the process from another thread, as NCCL's watchdog does, unless
           `TORCH_NCCL_ASYNC_ERROR_HANDLING` is 0
"""

from __future__ import annotations

SOURCE = r"""
import ctypes, os, signal, threading, torch, torch.distributed as dist

class _Manners:
    blocks = holds = hangs = tears_down = False

_manners = _Manners()

def behave(**manners):
    for name, value in manners.items():
        assert hasattr(_manners, name), name
        setattr(_manners, name, value)

class _Done(dist.Work):
    def wait(self, timeout=None):
        return True

class NcclManners(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        # in pthread_mutex_lock no signal ends the wait
        self._mutex = ctypes.create_string_buffer(128)
        self._c = ctypes.CDLL(None)
        self._c.pthread_mutex_lock(self._mutex)

    def getBackendName(self):
        return "nccl_manners"

    def _call(self, tensors, name, *args):
        if _manners.holds:
            ctypes.PyDLL(None).pthread_mutex_lock(self._mutex)
        elif _manners.blocks:
            self._c.pthread_mutex_lock(self._mutex)
            for tensor in tensors:
                tensor.fill_(float("nan"))
            return _Done()
        return getattr(self._gloo, name)(*args)

    def allreduce(self, tensors, options):
        return self._call(tensors, "allreduce", tensors, options)

    def broadcast(self, tensors, options):
        return self._call(tensors, "broadcast", tensors, options)

    def barrier(self, opts):
        return self._call((), "barrier", opts)

    def allgather(self, outputs, inputs, options):
        return self._call(inputs, "allgather", outputs, inputs, options)

    def abort(self):
        if _manners.tears_down and os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGABRT)).start()
        if _manners.hangs:
            ctypes.CDLL(None).pause()
        self._c.pthread_mutex_unlock(self._mutex)

if "nccl_manners" not in dist.Backend.backend_list:
    dist.Backend.register_backend("nccl_manners", NcclManners, devices=["cpu"])
if dist.get_backend() != "nccl_manners":
    dist.init_process_group("nccl_manners")
"""
