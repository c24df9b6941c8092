"""Zygotes that have executed what a notebook's runs import, so that later runs import it in milliseconds.

Each interpreter has at most one that is ready and one that is being prepared, beside its ordinary zygote. What the
modules have read at their import (variables, the working directory) must be the same for a run that uses them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sgpu_magic.agent.ranks.zygotes import Zygote, Zygotes
from sgpu_magic.config import Settings, read_preload
from sgpu_magic.files.preload_report import PreloadRow, write_report
from sgpu_magic.system.processes import threads_per_rank
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.rank import Preload, Preloaded
from sgpu_magic.wire.run import Interpreter

_MOST_LEARNED = 64
_MOST_INTERPRETERS = 2
# variables that libraries in C read, which is not seen
_READ_IN_C = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "VECLIB_", "MALLOC_", "LD_", "LC_", "LANG", "TZ",
    "PYTHON", "CUDA", "NCCL_", "TORCH", "PYTORCH_", "CUBLAS", "CUDNN", "TF_", "XLA_", "JAX_", "RAYON_", "RUST_",
    "TOKENIZERS_", "ARROW_", "GLIBC_", "HDF5_", "GDAL_", "PROJ_", "QT_", "DISPLAY", "HOME",
)  # fmt: skip


class _Context(msgspec.Struct, frozen=True):
    """The context of runs, as far as imports may depend on it."""

    interpreter: Interpreter
    environ: dict[str, str]
    rank_variables: tuple[str, ...]
    cwd: str
    sys_path: tuple[str, ...]


class _Prepared(msgspec.Struct):
    """A zygote with preloaded modules; `answer` is None until they are there."""

    zygote: Zygote
    order: Preload
    answer: Preloaded | None = None


class PreloadedZygotes:
    """The node's zygotes with preloaded modules.

    Args:
        zygotes: The node's zygotes.
        settings: The pool's settings.
        rank_variables: Returns the names of the variables that are each rank's own.
        on_ready: Called with an interpreter when its zygote with preloaded modules is ready.
    """

    def __init__(
        self,
        zygotes: Zygotes,
        settings: Settings,
        rank_variables: Callable[[Launch], tuple[str, ...]],
        on_ready: Callable[[Interpreter], None],
    ) -> None:
        self._zygotes = zygotes
        self._loop = asyncio.get_running_loop()
        self._named = read_preload(settings.preload)
        self._limit_bytes = settings.preload_bytes
        self._idle_s = settings.zygote_idle_s
        self._state = settings.state_path
        self._rank_variables = rank_variables
        self._on_ready = on_ready
        # imports that took long, by executable
        self._learned: dict[str, dict[str, None]] = {}
        # by the interpreter's key
        self._tried: dict[str, dict[str, tuple[str, ...]]] = {}
        self._refused: dict[str, dict[str, str]] = {}
        self._wanted: dict[str, _Context] = {}
        self._loading: dict[str, _Prepared] = {}
        self._ready: dict[str, _Prepared] = {}
        # replaced ones whose ranks still run
        self._replaced: list[Zygote] = []

    def learn(self, launch: Launch, modules: Sequence[str]) -> None:
        """Note imports that took long in a run."""
        if self._named is None:
            learned = self._learned.setdefault(launch.interpreter.executable, {})
            for name in modules:
                learned.setdefault(name)
            for name in list(learned)[:-_MOST_LEARNED]:
                del learned[name]
            self._wanted[launch.interpreter.key] = self._context_of(launch)

    def zygote_for(self, launch: Launch) -> Zygote | None:
        """Return a ready zygote whose modules the run would import alike, None if there is none."""
        key = launch.interpreter.key
        if self._named:
            self._learned.setdefault(launch.interpreter.executable, dict.fromkeys(self._named))
            if key not in self._ready and key not in self._loading:
                self._wanted[key] = self._context_of(launch)
        ready = self._ready.get(key)
        if ready is None or not self._zygotes.is_alive(ready.zygote):
            return None
        context = self._context_of(launch)
        if _fits(ready, context):
            return ready.zygote
        self._wanted[key] = context
        return None

    def last_used(self, interpreter: Interpreter) -> Zygote | None:
        """Return the interpreter's ready zygote, whether it fits the next run or not."""
        ready = self._ready.get(interpreter.key)
        return None if ready is None or not self._zygotes.is_alive(ready.zygote) else ready.zygote

    def pause(self) -> None:
        """Let preparations wait, since ranks compute; `tend` continues them."""
        for loading in self._loading.values():
            loading.zygote.pause_preload(True)

    def tend(self, *, is_busy: bool) -> None:
        """Begin and continue preparations while no ranks compute, and end zygotes that are not used any more."""
        for key, loading in list(self._loading.items()):
            if not self._zygotes.is_alive(loading.zygote):
                # it could not be used: without another import, another one could not either
                del self._loading[key]
                self._refused[key] = dict.fromkeys(loading.order.roots, "could not be executed together") | (
                    self._refused.get(key, {})
                )
            else:
                loading.zygote.pause_preload(is_busy)
        self._end_unused()
        if is_busy:
            return
        for key, context in list(self._wanted.items()):
            if key not in self._loading:
                del self._wanted[key]
                self._begin(key, context)

    # ------------------------------------------------------------ internals

    def _context_of(self, launch: Launch) -> _Context:
        context, ranks = launch.context, launch.part.ranks if launch.part else launch.spec.placement.ranks
        threads = str(threads_per_rank(context.environ, ranks))
        return _Context(
            interpreter=launch.interpreter,
            environ={**context.environ, "OMP_NUM_THREADS": threads},
            rank_variables=self._rank_variables(launch),
            cwd=context.cwd,
            sys_path=context.sys_path,
        )

    def _begin(self, key: str, context: _Context) -> None:
        tried = self._tried.setdefault(key, {})
        learned = self._learned.get(context.interpreter.executable, {})
        failed = self._refused.get(key, {}).keys() - tried.keys()
        roots = tuple(name for name in learned if tried.get(name, name) and name not in failed)
        ready = self._ready.get(key)
        is_there = ready is not None and self._zygotes.is_alive(ready.zygote) and _fits(ready, context)
        if not roots or (ready is not None and is_there and set(roots) <= set(ready.order.roots)):
            return
        order = Preload(
            roots=roots,
            tried={name: tried[name] for name in roots if name in tried},
            environ={name: value for name, value in context.environ.items() if name not in context.rank_variables},
            rank_variables=context.rank_variables,
            cwd=context.cwd,
            sys_path=context.sys_path,
            limit_bytes=self._limit_bytes,
        )
        # the ordinary zygote reports what is wrong with the interpreter
        with contextlib.suppress(OSError):
            loading = self._loading[key] = _Prepared(self._zygotes.start_another(context.interpreter), order)
            loading.zygote.preload(order, lambda answer: self._prepared(key, context, loading, answer))

    def _prepared(self, key: str, context: _Context, loading: _Prepared, answer: Preloaded) -> None:
        self._loading.pop(key, None)
        self._tried.setdefault(key, {}).update(answer.tried)
        self._refused.setdefault(key, {}).update(answer.refused)
        loading.answer = answer
        # the values of most variables are not needed any more
        loading.order = msgspec.structs.replace(loading.order, environ=_compared(loading.order.environ, answer.reads))
        if answer.roots:
            if (replaced := self._ready.pop(key, None)) is not None:
                self._replaced.append(replaced.zygote)
            self._ready[key] = loading
            loading.zygote.last_used = self._loop.time()
        else:
            self._zygotes.end(loading.zygote)
            # without the import that has made it unusable
            self._wanted.setdefault(key, context)
        self._end_unused()
        self._write_report()
        if answer.roots:
            self._on_ready(loading.zygote.interpreter)

    def _end_unused(self) -> None:
        for zygote in [zygote for zygote in self._replaced if zygote.idle]:
            self._replaced.remove(zygote)
            self._zygotes.end(zygote)
        by_use = sorted(self._ready.items(), key=lambda item: item[1].zygote.last_used)
        now = self._loop.time()
        for at, (key, ready) in enumerate(by_use):
            is_surplus = at < len(by_use) - _MOST_INTERPRETERS or now - ready.zygote.last_used > self._idle_s
            if not self._zygotes.is_alive(ready.zygote) or (is_surplus and ready.zygote.idle):
                del self._ready[key]
                self._zygotes.end(ready.zygote)
                self._write_report()

    def _write_report(self) -> None:
        rows: list[PreloadRow] = []
        for key, ready in self._ready.items():
            answer = ready.answer
            if answer is not None:
                rows.append(
                    PreloadRow(
                        executable=ready.zygote.interpreter.executable,
                        pid=ready.zygote.process.pid,
                        roots=answer.roots,
                        modules=answer.modules,
                        bytes=answer.bytes,
                        refused=self._refused.get(key, {}),
                    )
                )
        write_report(self._state, rows)


def _fits(prepared: _Prepared, context: _Context) -> bool:
    answer = prepared.answer
    if answer is None or (answer.reads_directory and prepared.order.cwd != context.cwd):
        return False
    return prepared.order.environ == _compared(
        {name: value for name, value in context.environ.items() if name not in context.rank_variables}, answer.reads
    )


def _compared(environ: Mapping[str, str], reads: Sequence[str]) -> dict[str, str]:
    """Return the variables that imports have read, or may have read in C."""
    return {name: value for name, value in environ.items() if name in reads or name.startswith(_READ_IN_C)}
