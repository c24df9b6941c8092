"""What a run needs at its pool: packages, code, variables. Nothing where the nodes see this machine's files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client.pool import Pool
from sgpu_magic.config import Settings
from sgpu_magic.packages.order import check_before_travel, mismatch_news
from sgpu_magic.packages.variables import travelling
from sgpu_magic.runs import packages
from sgpu_magic.runs.submit.redact import without_secrets
from sgpu_magic.wire.attachments import CodeBundle, Environment
from sgpu_magic.wire.run import CellSource, RunSpec
from sgpu_magic.wire.states import RunKind

if TYPE_CHECKING:
    from sgpu_magic.packages.bundle import Bundles
    from sgpu_magic.packages.local_code import LocalCode
    from sgpu_magic.runs.package_options import Wishes
    from sgpu_magic.runs.submit.submit import Submission


_OWN_PACKAGES = ("", "none")
_BUNDLES = "bundles"
_MOST_SESSIONS = 50


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the ranks of a session have: they may import later what an earlier cell brought.

    Args:
        modules: Local modules.
        projects: Directories of projects that they have wheels of.
    """

    modules: frozenset[str] = frozenset()
    projects: tuple[str, ...] = ()


_sent: dict[str, _Sent] = {}


@dataclass(frozen=True, slots=True)
class Luggage:
    """What goes along.

    Args:
        spec: The run's, with the digests of what goes along and no secret in it.
        environ: The ranks' variables.
        environment: Their packages; None where the kernel's Python is used and nothing is known of its packages yet.
        code: Bundles of local code.
        elsewhere: The nodes do not see this machine's files.
        cell: The cell as it is to be run; None where that is the spec's.
    """

    spec: RunSpec
    environ: dict[str, str]
    environment: Environment | None = None
    code: tuple[CodeBundle, ...] = ()
    elsewhere: bool = False
    cell: CellSource | None = None


def pack_up(pool: Pool, settings: Settings, submission: Submission) -> Luggage:
    """Gather what the run's ranks need and the pool's nodes may not have.

    Where they see this machine's files and no other packages were asked for that is nothing: less than 0.1 ms.

    Args:
        pool: The pool.
        settings: Its settings as they are now.
        submission: The run.

    Raises:
        EnvironmentFailed: It can't be had there, as known before anything starts.
        SerializationError: The payload needs modules that can't travel.
        UsageError: `--env-version` names nothing.
        PoolError: The pool can't be started or reached.
    """
    spec, cell = without_secrets(submission.spec, submission.environ)
    if not pool.sees_client:
        return _for_elsewhere(pool, settings, submission, spec, cell)
    environment: Environment | None = None
    if not spec.in_session and submission.interpreter is None:
        wished = _wished(pool, settings, submission)
        if wished is not None:
            environment, notes = wished
            if not environment.resolve:
                # the ranks see this machine's files, but they import from other packages
                code = _local_code(submission, cell or spec.cell, (), ())
                _check_references(submission, code, environment, ())
            spec = _with_environment(spec, environment, notes)
            packages.of(pool).keep(environment)
        else:
            spec = msgspec.structs.replace(spec, environment=packages.of(pool).digest_for(spec.run_id))
            spec = _noted(spec, (*_without_effect(submission.wishes), *mismatch_news()))
    return Luggage(spec, submission.environ, environment, cell=cell)


# ---------------------------------------------------------------- within


def _for_elsewhere(
    pool: Pool, settings: Settings, submission: Submission, spec: RunSpec, cell: CellSource | None
) -> Luggage:
    environment: Environment | None = None
    session = spec.session if spec.in_session else spec.run_id
    known = _sent.get(session, _Sent())
    projects = known.projects
    if not spec.in_session:
        wished = _wished(pool, settings, submission)
        if wished is None:
            wished, projects = _own(pool, submission)
        environment, notes = wished
        spec = _with_environment(spec, environment, notes)
        packages.of(pool).keep(environment)
    variables = travelling(submission.environ, given=submission.given, chosen=settings.variables)
    code = _local_code(submission, cell or spec.cell, known.modules, projects)
    if spec.in_session or spec.kind is RunKind.SESSION:
        _remember(session, _Sent(known.modules.union(name for each in code for name in each.modules), projects))
    _check_references(submission, code, environment, projects)
    bundles, notes = _bundled(settings, code)
    spec = msgspec.structs.replace(
        spec,
        code=tuple((bundle.entry, bundle.sha256) for bundle in bundles),
        variable_names=tuple(sorted(variables.values)),
        secret_names=tuple(sorted(variables.secrets)),
    )
    return Luggage(_noted(spec, notes), variables.values, environment, bundles, elsewhere=True, cell=cell)


def _without_effect(wishes: Wishes) -> tuple[str, ...]:
    """A sentence about options that change nothing where the ranks have the notebook's own Python."""
    asked = [*["--torch mine"] * wishes.torch_mine, *["--allow-build"] * wishes.allow_build]
    if not asked:
        return ()
    change = "change" if len(asked) > 1 else "changes"
    return (
        f"{' and '.join(asked)} {change} nothing for this run: its ranks have the notebook's own Python, and nothing "
        "is installed for them",
    )


def _wished(pool: Pool, settings: Settings, submission: Submission) -> tuple[Environment, tuple[str, ...]] | None:
    """The packages that were asked for, None where the notebook's own are meant."""
    wishes = submission.wishes
    if (wishes.env_version or settings.env_version) in _OWN_PACKAGES:
        return None
    # only loaded where packages travel
    from sgpu_magic.packages import bases

    chosen = bases.chosen(settings, wishes.env_version, torch_mine=wishes.torch_mine, allow_build=wishes.allow_build)
    if chosen is None:
        return None
    driver = _driver(pool) if wishes.torch_mine else ""
    return chosen.environment, (*chosen.notes, *check_before_travel(chosen.environment, driver=driver))


def _own(pool: Pool, submission: Submission) -> tuple[tuple[Environment, tuple[str, ...]], tuple[str, ...]]:
    """The notebook's own packages, and the directories of projects of which wheels were made."""
    wishes, own = submission.wishes, packages.of(pool)
    ordered = own.environment(torch_mine=wishes.torch_mine, allow_build=wishes.allow_build)
    snapshot = own.snapshot()
    driver = _driver(pool) if wishes.torch_mine else ""
    notes = (*ordered.notes, *check_before_travel(ordered.environment, snapshot, driver=driver))
    wheels = {wheel.file.partition("-")[0].replace("_", "-").lower() for wheel in ordered.environment.wheels}
    projects = tuple(str(each.path) for each in snapshot.distributions if each.key in wheels and each.path is not None)
    return (ordered.environment, notes), tuple(project for project in projects if os.path.isdir(project))


def _driver(pool: Pool) -> str:
    """The version of the node's NVIDIA driver, "" without one."""
    status = pool.status(recent=0)
    return status.inventory.driver if status is not None else ""


def _local_code(
    submission: Submission, cell: CellSource, known: Iterable[str], projects: Iterable[str]
) -> list[LocalCode]:
    from sgpu_magic.packages.local_code import find_local_code

    stand = submission.stand
    cwd = stand.cwd if stand is not None else working_directory()
    path = stand.sys_path if stand is not None else tuple(entry or cwd for entry in sys.path)
    sources = [cell.body, *(source for _, source, _ in cell.linecache), *_files(submission.packed.files)]
    return find_local_code(path, [*sources, *(f"import {name}" for name in known)], elsewhere=projects, cwd=cwd)


def _remember(session: str, sent: _Sent) -> None:
    _sent[session] = sent
    while len(_sent) > _MOST_SESSIONS:
        del _sent[next(iter(_sent))]


def _files(files: Iterable[str]) -> Iterable[str]:
    """The sources of functions that are from real files: a program's own."""
    for file in files:
        try:
            yield Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            # a cell's name, or an interactive line
            continue


def _check_references(
    submission: Submission, code: Iterable[LocalCode], environment: Environment | None, projects: tuple[str, ...]
) -> None:
    from sgpu_magic.packages.references import check_references

    check_references(submission.packed.modules, code, environment, projects=projects)


def _bundled(settings: Settings, code: list[LocalCode]) -> tuple[tuple[CodeBundle, ...], tuple[str, ...]]:
    from sgpu_magic.packages.bundle import check_size

    notes = check_size(code, warn_bytes=settings.code_warn_bytes, limit_bytes=settings.code_limit_bytes)
    bundles = _bundles_in(settings.state_path / _BUNDLES)
    return tuple(bundles.bundle(each) for each in code), notes


def _bundles_in(folder: Path) -> Bundles:
    from sgpu_magic.packages.bundle import Bundles

    return _bundles.setdefault(folder, Bundles(folder))


_bundles: dict[Path, Bundles] = {}


def _with_environment(spec: RunSpec, environment: Environment, notes: tuple[str, ...]) -> RunSpec:
    spec = msgspec.structs.replace(spec, environment=environment.digest, environment_label=environment.label)
    return _noted(spec, notes)


def _noted(spec: RunSpec, notes: tuple[str, ...]) -> RunSpec:
    if not notes:
        return spec
    shipped = msgspec.structs.replace(spec.shipped, notes=(*spec.shipped.notes, *notes))
    return msgspec.structs.replace(spec, shipped=shipped)


def working_directory() -> str:
    """Return this process's working directory; `/` where that was removed, and nothing relative can be meant."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep
