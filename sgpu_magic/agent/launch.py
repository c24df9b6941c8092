"""Turns a launch into ranks. Packages and code that need preparation are prepared first.

`place_here` maps the kernel's context (working directory, `sys.path`, variables) to this node. The context stays as it
is where the node sees the kernel's files and runs its Python. Otherwise the built Python's packages replace the
kernel's, code bundles replace its local code, and a directory of the run replaces its working directory.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sgpu_magic.agent.environments import Environments
from sgpu_magic.agent.inputs.launch_inputs import CodeUnusable, LaunchInputs, travels_by_blobs
from sgpu_magic.agent.ranks.standby_groups import StandbyGroups
from sgpu_magic.agent.reports import Reports
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.runs.execution_kinds import FreshRun
from sgpu_magic.agent.runs.node_run import Attempt, Surroundings
from sgpu_magic.agent.runs.preparing import PreparingRun
from sgpu_magic.agent.runs.session import Session, SessionRefuses
from sgpu_magic.packages.node.store import Built
from sgpu_magic.wire.node import Launch
from sgpu_magic.wire.run import Interpreter, RankContext
from sgpu_magic.wire.states import FailureKind, RunKind


class Launches(msgspec.Struct, frozen=True):
    """Starts the runs, sessions and cells that the pool orders.

    Args:
        groups: Provides the ranks.
        runs: Registers what was started.
        reports: Reports events to the pool service.
        here: What all runs of the agent share.
        environments: Builds packages.
        inputs: Fetches the notebook's code and files.
    """

    groups: StandbyGroups
    runs: RunRegistry
    reports: Reports
    here: Surroundings
    environments: Environments
    inputs: LaunchInputs

    def launch(self, launch: Launch, frames: Sequence[bytes]) -> None:
        """Start a run, a session, or a cell in a session."""
        spec = launch.spec
        if spec.in_session:
            attempt = Attempt(launch, frames)
            if travels_by_blobs(launch):
                self._prepare(attempt)
            else:
                self._launch_in_session(attempt)
            return
        if spec.session and (session := self.runs.session(spec.session)) is not None:
            # a fresh run on a session's lease uses the session's environment
            launch = replace(launch, environment=session.launch.environment)
        attempt = Attempt(launch, frames, self.runs.get(spec.run_id))
        environment = launch.environment if self.environments.needed(launch) else None
        built = None if environment is None else self.environments.at_hand(environment)
        if launch.code or (environment is not None and built is None) or travels_by_blobs(launch):
            self._prepare(attempt)
            return
        if built is not None:
            self.reports.happened(spec.run_id, self.environments.found(built), ())
        self._start(attempt, built, {})
        if built is not None:
            # the zygote holds the environment from now on
            self.environments.leave(spec.run_id)

    # ------------------------------------------------------------ within

    def _refuse_unrecorded(self, launch: Launch, error: OSError | ValueError) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.runs.say_over(
            launch.spec.run_id,
            f"the run can't be recorded on {socket.gethostname()}: {launch.run_dir} can't be written ({why}). "
            "Other runs are not affected. Free some space there, or make it writable, and run the cell again.",
            FailureKind.INTERNAL,
        )

    def _prepare(self, attempt: Attempt) -> None:
        """Prepare packages and inputs, then start."""
        try:
            run = PreparingRun(attempt, self.here, self.environments, self.inputs, self._prepared)
        except (OSError, ValueError) as error:
            self._refuse_unrecorded(attempt.launch, error)
            return
        self.runs.add(run)
        run.start()

    def _prepared(self, run: PreparingRun, built: Built | None, code: Mapping[str, str]) -> None:
        """Start a run whose packages and inputs are ready."""
        attempt = Attempt(run.launch, run.frames, run)
        if run.launch.spec.in_session:
            self._launch_in_session(attempt)
        else:
            self._start(attempt, built, code)

    def _start(self, attempt: Attempt, built: Built | None, code: Mapping[str, str]) -> None:
        try:
            launch = self._placed(attempt.launch, built, code)
        except OSError as error:
            self._refuse_unrecorded(attempt.launch, error)
            return
        try:
            group, warm = self.groups.take(launch)
        except OSError as error:
            text = f"{launch.interpreter.executable} can't be started: {error}"
            self.runs.say_over(launch.spec.run_id, text, FailureKind.ENVIRONMENT)
            return
        kind = Session if launch.spec.kind is RunKind.SESSION else FreshRun
        try:
            run = kind(replace(attempt, launch=launch), group, warm, self.here)
        except BaseException as error:
            self.groups.dismiss(group)
            if not isinstance(error, OSError | ValueError):
                raise
            self._refuse_unrecorded(launch, error)
            return
        self.runs.add(run)
        run.start()

    def _launch_in_session(self, attempt: Attempt) -> None:
        launch = attempt.launch
        session = self.runs.session(launch.spec.session)
        try:
            if session is None:
                raise SessionRefuses("its session has ended. %sgpu_connect starts another one.")
            cell = session.execute(replace(attempt, launch=self._placed_in(session, launch)))
        except SessionRefuses as error:
            self.runs.say_over(launch.spec.run_id, str(error), FailureKind.SESSION)
        except CodeUnusable as error:
            self.runs.say_over(launch.spec.run_id, str(error), FailureKind.ENVIRONMENT)
        except (OSError, ValueError) as error:
            self._refuse_unrecorded(launch, error)
        else:
            self.runs.add(cell)
            cell.start()

    def _placed(self, launch: Launch, built: Built | None, code: Mapping[str, str]) -> Launch:
        placed = self.inputs.uploaded.placed(place_here(launch, built, code))
        if built is None or placed.environment is None:
            return placed
        name = self.environments.name(placed.environment)
        return replace(placed, interpreter=_interpreter(name, built, placed))

    def _placed_in(self, session: Session, launch: Launch) -> Launch:
        """Give a cell the context of its session."""
        built = None
        environment = session.launch.environment
        if environment is not None and self.environments.needed(session.launch):
            # the zygote of the session's ranks holds the environment
            built = self.environments.at_hand(environment)
        # known bundles cost only a look-up
        code: Mapping[str, str] = self.inputs.code.unpack(launch.spec.session, launch.code) if launch.code else {}
        return self.inputs.uploaded.placed(place_here(launch, built, code))


# ---------------------------------------------------------------- the kernel's context on this node


# variables of the kernel's Python, which do not apply to a built one
_KERNELS_PYTHON = ("PYTHON", "CONDA_", "_CE_", "MAMBA_", "PYENV_", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "UV_PROJECT")
# harmless exceptions that users set on purpose
_CHOICES = frozenset({
    "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE",
    "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONTRACEMALLOC", "PYTHONASYNCIODEBUG", "PYTHONBREAKPOINT",
})  # fmt: skip
# a zygote needs these to start, besides the variables that the kernel's zygote would have
_ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "TZ", "VIRTUAL_ENV")
# `site-packages`, and Debian's `dist-packages`
_PACKAGES = "-packages"
# the agent's own variables, which ranks do not inherit
_AGENTS_OWN = ("SGPU_", "JPY_", "PYTHONSAFEPATH", "KERNEL_")


def place_here(launch: Launch, built: Built | None, code: Mapping[str, str]) -> Launch:
    """Return the launch with its context mapped to this node. Idempotent.

    Args:
        launch: The launch as the client sent it.
        built: The Python built for the launch; None to use the kernel's.
        code: Folders of local code on this node, by the kernel's `sys.path` entry.

    Raises:
        OSError: The run's directory can't be written.
    """
    context = launch.context
    if built is None and not code and not context.elsewhere:
        return launch
    home = _home(launch)
    path = _path(context, built, code, home)
    cwd = context.cwd
    if context.elsewhere:
        cwd = os.path.join(home, "work")
        os.makedirs(cwd, mode=0o700, exist_ok=True)
    environ = _environ(launch, built)
    placed = replace(context, cwd=cwd, sys_path=path, environ=environ, installed=())
    return replace(launch, context=placed)


def _home(launch: Launch) -> str:
    """Return the directory of the ranks' owner; cells of a session share the session's."""
    if launch.spec.in_session:
        return os.path.join(os.path.dirname(launch.run_dir), launch.spec.session)
    return launch.run_dir


def _path(context: RankContext, built: Built | None, code: Mapping[str, str], home: str) -> tuple[str, ...]:
    links = os.path.join(home, "code")
    path: list[str] = []
    for entry in context.sys_path:
        if built is not None and entry in built.sys_path:
            path.append(entry)
        elif built is not None and entry in context.installed:
            # the notebook's folder comes between the two: it shadows packages, but not the standard library
            of_packages = _PACKAGES in entry
            path += (own for own in built.sys_path if _is_of_packages(own, built) == of_packages)
        elif entry in code:
            path.append(_linked(links, entry, code[entry]))
        elif not context.elsewhere or entry in context.installed or entry.startswith(links + os.sep):
            path.append(entry)
        elif os.path.islink(link := _link(links, entry)):
            # made by an earlier cell of the session
            path.append(link)
    if built is not None:
        path += built.sys_path
    return tuple(dict.fromkeys(path))


def _is_of_packages(entry: str, built: Built) -> bool:
    return entry.startswith(os.path.dirname(built.prefix) + os.sep)


def _link(links: str, entry: str) -> str:
    return os.path.join(links, hashlib.sha256(os.fsencode(entry)).hexdigest()[:8])


def _linked(links: str, entry: str, folder: str) -> str:
    """Point a link with a stable name to the folder: a session's ranks then see an edited module as a changed file."""
    link = _link(links, entry)
    try:
        if os.readlink(link) == folder:
            return link
    except OSError:
        os.makedirs(links, mode=0o700, exist_ok=True)
    temporary = f"{link}.part"
    Path(temporary).unlink(missing_ok=True)
    os.symlink(folder, temporary)
    os.replace(temporary, link)
    return link


def _environ(launch: Launch, built: Built | None) -> dict[str, str]:
    context, given = launch.context, frozenset(launch.spec.env_names)
    environ = dict(context.environ)
    if built is not None:
        environ = {name: value for name, value in environ.items() if name in given or not _is_kernels(name)}
    if context.elsewhere:
        here = {n: v for n, v in os.environ.items() if not n.startswith(_AGENTS_OWN) and not _is_kernels(n)}
        environ = here | environ
    if built is not None:
        programs = os.path.join(built.prefix, "bin")
        environ["VIRTUAL_ENV"] = built.prefix
        if "PATH" not in given:
            environ["PATH"] = os.pathsep.join(_without_kernels(environ.get("PATH", os.defpath), context, programs))
    return environ


def _interpreter(name: str, built: Built, placed: Launch) -> Interpreter:
    """Return the built Python as an interpreter with its own zygote.

    Args:
        name: The environment's name on this node.
        built: The built Python.
        placed: The launch with its context mapped to this node.
    """
    environ = placed.context.environ
    names = [*placed.interpreter.variables, *_ALWAYS]
    variables = {name: environ[name] for name in names if name in environ}
    digest = hashlib.blake2b(digest_size=4)
    for item in sorted(variables.items()):
        digest.update(repr(item).encode())
    return Interpreter(executable=built.executable, key=f"{name}-{digest.hexdigest()}", variables=variables)


def _is_kernels(name: str) -> bool:
    return name.startswith(_KERNELS_PYTHON) and name not in _CHOICES


def _without_kernels(path: str, context: RankContext, programs: str) -> Iterable[str]:
    """Put the built environment's programs first in `PATH` and drop those of the kernel's environment."""
    own = context.environ.get("VIRTUAL_ENV") or context.environ.get("CONDA_PREFIX")
    left_out = {programs, os.path.join(own, "bin")} if own and own != os.path.dirname(programs) else {programs}
    yield programs
    for entry in path.split(os.pathsep):
        if entry and entry not in left_out:
            yield entry
