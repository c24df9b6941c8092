"""What a rank takes over before a cell: the kernel's context and results, its device, its place in the process group.

The kernel's context is its working directory, `sys.path`, environment, umask and process-wide settings. Its results are
`_`, `Out` and the like, which come with a cell that reads them, and what `%store` has stored.
"""

# IPython's own attributes are only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.process
import os
import random
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from IPython.paths import get_ipython_dir

from sgpu_magic.errors import EnvironmentFailed
from sgpu_magic.system.process_settings.rank_settings import RankSettings
from sgpu_magic.system.processes import threads_per_rank
from sgpu_magic.wire.devices import is_slice
from sgpu_magic.wire.rank import Fork
from sgpu_magic.wire.run import RankContext
from sgpu_magic.worker.cell.displays import hook_of
from sgpu_magic.worker.cell.edited_modules import EditedModules
from sgpu_magic.worker.cell.shell import RankShell
from sgpu_magic.worker.group import rendezvous
from sgpu_magic.worker.group.renewal import renew
from sgpu_magic.worker.process import position, stand_in
from sgpu_magic.worker.process.patches import after_import

_LAST_RESULTS = ("_", "__", "___")
_ALL_RESULTS = ("_oh", "Out")
_STORE_READS = ("-r", "-h")


def use_working_context(context: RankContext, rank_variables: dict[str, str]) -> None:
    """Take over the kernel's working directory, `sys.path`, umask and whole environment.

    Args:
        context: The kernel's context.
        rank_variables: torchrun's variables of this rank, set over the kernel's.

    Raises:
        OSError: The kernel's directory can't be entered any more.
    """
    os.umask(context.umask)
    _set_environ(context.environ | rank_variables)
    if context.cwd:
        os.chdir(context.cwd)
        # where a spawned process looks for a script that was started by a relative path
        multiprocessing.process.ORIGINAL_DIR = context.cwd  # pyright: ignore[reportAttributeAccessIssue]
    sys.path[:] = context.sys_path
    sys.argv[:] = [""]
    forget_missing_directories()


def _set_environ(wanted: Mapping[str, str]) -> None:
    """Make the environment equal. What is equal already is not written: each write copies pages after a fork."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def reseed() -> None:
    """Seed the random number generators anew, as in a new process.

    A new process seeds torch's CPU generator from the system (c10 `createCPUGenerator`), and its CUDA generators all
    alike.
    """
    random.seed()
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def set_threads(context_environ: dict[str, str], ranks_here: int) -> None:
    """Use the user's `OMP_NUM_THREADS`, else an equal share of the cores (torchrun gives 1).

    `OMP_NUM_THREADS` alone has no effect once torch is imported. The zygote limits numpy's BLAS to one thread.
    """
    threads = threads_per_rank(context_environ, ranks_here)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if threads > 1:
        with contextlib.suppress(ImportError):
            import threadpoolctl

            threadpoolctl.threadpool_limits(limits=threads, user_api="blas")


def follow_kernel(old: RankContext, new: RankContext, rank_variables: dict[str, str]) -> None:
    """Take over the kernel's changes since the last cell, and keep the rank's own changes.

    Args:
        old: The kernel's context at the last cell.
        new: The kernel's context now.
        rank_variables: The rank's own variables, which the kernel's never replace.

    Raises:
        OSError: The kernel's new directory can't be entered any more.
    """
    if new.umask != old.umask:
        os.umask(new.umask)
    if new.environ != old.environ:
        for name in old.environ.keys() - new.environ.keys() - rank_variables.keys():
            os.environ.pop(name, None)
        for name, value in new.environ.items():
            if name not in rank_variables and old.environ.get(name) != value:
                os.environ[name] = value
    if new.cwd != old.cwd and new.cwd:
        os.chdir(new.cwd)
    if new.sys_path != old.sys_path:
        known = set(old.sys_path)
        first = next((at for at, entry in enumerate(sys.path) if entry in known), 0)
        own = [entry for entry in sys.path if entry not in known and entry not in new.sys_path]
        before = [entry for entry in own if entry in sys.path[:first]]
        sys.path[:] = [*before, *new.sys_path, *(entry for entry in own if entry not in before)]
    forget_missing_directories()


_newest_of_zygote = ""


def forget_missing_directories() -> None:
    """Make the import system look again at path entries that did not exist before, which it caches as empty for good.

    It notices changed directories by their modification time. `importlib.invalidate_caches` would touch 1.5 MB in
    every rank, and reading the zygote's part of the cache 1 MB.
    """
    cache = sys.path_importer_cache
    newer = itertools.takewhile(lambda entry: entry != _newest_of_zygote, reversed(cache))
    for entry in [entry for entry in newer if cache[entry] is None]:
        del cache[entry]


def remember_path_entries() -> None:
    """Forget missing directories, and leave the entries that there are to the zygote: ranks look at newer ones only."""
    global _newest_of_zygote
    forget_missing_directories()
    _newest_of_zygote = next(reversed(sys.path_importer_cache), "")


def set_device(kind: str, rank_variables: dict[str, str], *, cpu_stands_in: bool) -> torch.device:
    """Make the rank's own GPU current and return the rank's device.

    Args:
        kind: `cpu`, or `cuda` when the rank has its own GPU.
        rank_variables: torchrun's variables of this rank.
        cpu_stands_in: Whether the rank computes on the CPU if torch can't use its GPU.

    Raises:
        EnvironmentFailed: torch can't use the rank's GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    index = 0 if has_slice(rank_variables) else int(rank_variables["LOCAL_RANK"])
    problem = _why_unusable(index)
    if not problem:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device
    what = f"torch {torch.__version__} can't use the GPU of rank {rank_variables['RANK']} on {socket.gethostname()}"
    if not cpu_stands_in:
        raise EnvironmentFailed(
            f"{what}: {problem}. Install a torch that is built for this machine's driver in the ranks' environment "
            "(`sgpu doctor` checks both), or run on the CPU: with `--type cpu`, or with SGPU_STAND_IN=cpu."
        )
    if rank_variables["LOCAL_RANK"] == "0":
        sys.stderr.write(f"{what}: {problem}. SGPU_STAND_IN is set, so the ranks compute on the CPU.\n")
    return torch.device("cpu")


def _why_unusable(index: int) -> str:
    """Return why torch can't use the GPU with this index, "" if it can."""
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:
            return str(error).strip().partition("\n")[0].rstrip(".")
        return "it finds no GPU"
    count = torch.cuda.device_count()
    return f"it finds {count} of the GPUs that the run holds" if index >= count else ""


def has_slice(rank_variables: dict[str, str]) -> bool:
    """Whether the rank's device is a MIG slice, the only device that it sees."""
    return is_slice(rank_variables["CUDA_VISIBLE_DEVICES"])


# ---------------------------------------------------------------- the notebook's results


@contextlib.contextmanager
def results_received(shell: RankShell) -> Generator[None]:
    """Take over results of the notebook that are set in the namespace meanwhile, beside the rank's own results."""
    namespace = shell.user_ns
    own = namespace["_oh"]
    before = {name: namespace.get(name) for name in _LAST_RESULTS}
    yield
    for name in _ALL_RESULTS:
        if namespace.get(name) is not own:
            own.update(namespace[name])
            namespace[name] = own
    for name, value in before.items():
        if namespace.get(name) is not value:
            # otherwise the display hook treats it as a user's variable and no longer sets it
            setattr(hook_of(shell), name, namespace[name])


def share_store(shell: RankShell) -> None:
    """Load IPython's extension as a kernel does, with a `%store` that several ranks may use at once.

    All ranks read what is stored, and the first one of those that run a cell writes.
    """
    manager: Any = shell.extension_manager
    manager.load_extension("storemagic")
    original: Callable[[str], Any] = shell.magics_manager.magics["line"]["store"]

    def store(line: str = "") -> Any:
        # in the notebook's directory: the shell was created in the zygote, which has another
        path = os.path.join(get_ipython_dir(), "profile_default", "db")
        if str(shell.db.root) != path:
            shell.db = type(shell.db)(path)
        words = line.split()
        if not words or words[0] in _STORE_READS or shell.is_first:
            return original(line)
        return None

    store.__doc__ = original.__doc__
    shell.register_magic_function(store, "line", "store")  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- the state between cells


class RankState:
    """A rank's state between cells: `take` sets all of it up, `follow` applies what changes from cell to cell.

    Args:
        fork: The group and this rank's place in it.
        store_path: File of the first rendezvous.
        join_error: Why the rank could not join the group early; None if it has joined or has not tried.
    """

    def __init__(self, fork: Fork, store_path: str, join_error: RuntimeError | None) -> None:
        self.rank = fork.rank
        self.ranks = fork.ranks
        self.shell = RankShell.instance()
        self.cuda = False
        # NCCL can't connect slices of one GPU; gloo also takes tensors on a GPU
        self.uses_nccl = False
        self.modules = EditedModules(self.shell)
        self._store_path = store_path
        # reported once in each run of such a rank
        self.stand_in_note = ""
        self._join_error = join_error
        self._joined = fork.join_early
        self._context: RankContext | None = None
        self._variables: dict[str, str] = {}
        self._settings = RankSettings(after_import)
        self._own_names: dict[str, object] = {}
        # reported once by the first rank
        self.settings_refused: list[str] = []

    def enter(
        self, context: RankContext, device: str, rank_variables: dict[str, str], *, renewal: bool = False
    ) -> None:
        """Take over the kernel's context, set the device and join the process group.

        Args:
            context: The kernel's context.
            device: `cpu`, or `cuda` when the rank has its own GPU.
            rank_variables: torchrun's variables of this rank.
            renewal: The other ranks already have a group and reconnect it.

        Raises:
            OSError: The kernel's directory can't be entered any more.
            EnvironmentFailed: torch can't use the rank's GPU.
            RuntimeError: A peer is gone.
        """
        use_working_context(context, rank_variables)
        rendezvous.late_store.address = rank_variables["MASTER_ADDR"], rank_variables["MASTER_PORT"]
        rendezvous.late_store.rank, rendezvous.late_store.ranks = self.rank, self.ranks
        set_threads(context.environ, int(rank_variables["LOCAL_WORLD_SIZE"]))
        self._context, self._variables = context, rank_variables
        self.cuda = device != "cpu"
        self.uses_nccl = self.cuda and not has_slice(rank_variables)
        if self._join_error is not None:
            raise self._join_error
        if context.maps_cuda and not self.cuda:
            # not imported in the zygote, so that only such ranks pay for it
            from sgpu_magic.worker.process import cuda_on_cpu

            self.stand_in_note = cuda_on_cpu.NOTE
            stand_in.map_cuda(int(rank_variables["LOCAL_WORLD_SIZE"]), int(rank_variables["LOCAL_RANK"]))
        own_device = set_device(device, rank_variables, cpu_stands_in=context.cpu_stands_in)
        if not self._joined:
            # the kernel's environment has replaced the zygote's, which had the recorder's variable
            position.record_collectives()
            if renewal:
                renew(self.rank, self.ranks, self._store_path, (self.rank,), cuda=self.uses_nccl)
            else:
                several = rank_variables["GROUP_WORLD_SIZE"] != "1"
                rendezvous.join(self.rank, self.ranks, self._store_path, cuda=self.uses_nccl, several_nodes=several)
            self._joined = True
        # after joining the group: a filter that turns warnings into errors is meant for the cell
        self.settings_refused = self._settings.follow(context.settings)
        self._own_names = {
            "rank": self.rank,
            "local_rank": int(rank_variables["LOCAL_RANK"]),
            "world_size": self.ranks,
            "device": own_device,
        }
        self.shell.user_ns.update(self._own_names)
        # `%cd -` goes back to the directory before
        self.shell.user_ns["_dh"][:] = [os.getcwd()]

    def follow(self, context: RankContext, rank_variables: dict[str, str]) -> None:
        """Take over the kernel's changes since the last cell, and keep the rank's own changes.

        Raises:
            OSError: The kernel's new directory can't be entered any more.
        """
        old, self._context = self._context or context, context
        for name, value in self._own_names.items():
            # a cell may have removed it, with `del` or `%reset`
            self.shell.user_ns.setdefault(name, value)
        os.environ.update(rank_variables.items() - self._variables.items())
        # a new process as rank 0 has a port of its own
        rendezvous.late_store.address = rank_variables["MASTER_ADDR"], rank_variables["MASTER_PORT"]
        self._variables = rank_variables
        follow_kernel(old, context, rank_variables)
        self.settings_refused = self._settings.follow(context.settings)
        if old.environ.get("OMP_NUM_THREADS") != context.environ.get("OMP_NUM_THREADS"):
            set_threads(context.environ, int(rank_variables["LOCAL_WORLD_SIZE"]))
