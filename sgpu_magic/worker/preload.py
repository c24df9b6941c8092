"""What the zygote imports and warms, so that no rank has to."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

from sgpu_magic.functions import compat
from sgpu_magic.worker import flight_recorder


def preload() -> str:
    """Import torch and IPython and make the rank's shell. Returns torch's version.

    Starts no thread: numpy's BLAS would start a pool at import, so its pool is held at one thread until the fork;
    `place.set_threads` raises it again in the rank.
    """
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import torch.distributed as dist

        # what each rank needs at once would otherwise be imported, and lie in memory, once per rank
        for name in ("numpy.random", "threadpoolctl", "pdb", "sgpu_magic.worker.rank", "sgpu_magic.worker.renewal"):
            _import_quietly(name)
        from sgpu_magic.worker import (
            edited_modules,
            execute,
            lone_training,
            notebook_classes,
            questions,
            rendezvous,
            shell,
            widgets,
        )

        if dist.is_available():
            flight_recorder.switch_on()
            rendezvous.accept_second_init()
        notebook_classes.teach_multiprocessing()
        edited_modules.note_imports()
        lone_training.install()
        widgets.install()
    compat.install()
    # outside: the shell's own filters stay, as in the notebook
    rank_shell = shell.create()
    execute.warm_up(rank_shell)
    questions.warm_up(rank_shell)
    _leave_finalizers_out_of_exits()
    return str(torch.__version__)


def _leave_finalizers_out_of_exits() -> None:
    """What was made here is not taken down by each rank: torch's operator libraries would copy 28 MB for that."""
    registry: dict[Any, object] = vars(weakref.finalize)["_registry"]
    for made_here in list(registry):
        made_here.atexit = False


def _import_quietly(name: str) -> None:
    import contextlib
    import importlib

    with contextlib.suppress(ImportError):
        importlib.import_module(name)
