"""What a run needs at its pool: packages, code, variables. Nothing where the nodes see this machine's files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.submitter import Attachments
from sgpu_magic.config import Settings
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.packages.travel_checks import check_before_travel, check_references, mismatch_news
from sgpu_magic.packages.variables import travelling
from sgpu_magic.runs import packages
from sgpu_magic.runs.notebook import working_directory
from sgpu_magic.runs.submit.spec import Submission, without_secrets
from sgpu_magic.wire.attachments import CodeBundle, Environment
from sgpu_magic.wire.run import CellSource, RunSpec
from sgpu_magic.wire.states import RunKind

if TYPE_CHECKING:
    from sgpu_magic.options.asked import Wishes
    from sgpu_magic.packages.code_files import Bundles
    from sgpu_magic.packages.local_code import LocalCode


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
_bundles: dict[Path, Bundles] = {}


Inputs = tuple[RunSpec, dict[str, str], Attachments]
"""The spec with the digests of what goes along and no secret in it, the ranks' variables, and what goes along."""


def inputs_of(pool: Pool, settings: Settings, submission: Submission) -> Inputs:
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
    along = Attachments(interpreter=submission.interpreter, stand=submission.stand, cell=cell)
    if not pool.sees_client:
        return _for_elsewhere(pool, settings, submission, spec, along)
    if not spec.in_session and submission.interpreter is None:
        wished = _wished(pool, settings, submission)
        if wished is not None:
            environment, notes = wished
            if not environment.resolve:
                # the ranks see this machine's files, but they import from other packages
                _local_code(submission, cell or spec.cell, environment)
            along = replace(along, environment=environment)
            spec = _with_environment(spec, environment, notes)
        else:
            spec = msgspec.structs.replace(spec, environment=packages.of(pool).digest_for(spec.run_id))
            spec = _noted(spec, (*_without_effect(submission.wishes), *mismatch_news()))
    return spec, submission.environ, along


# ---------------------------------------------------------------- within


def _for_elsewhere(pool: Pool, settings: Settings, submission: Submission, spec: RunSpec, along: Attachments) -> Inputs:
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
    variables = travelling(submission.environ, given=submission.given, chosen=settings.variables)
    code = _local_code(submission, along.cell or spec.cell, environment, known.modules, projects)
    if spec.in_session or spec.kind is RunKind.SESSION:
        _remember(session, _Sent(known.modules.union(name for each in code for name in each.modules), projects))
    bundles, notes = _bundled(settings, code)
    spec = msgspec.structs.replace(
        spec,
        code=tuple((bundle.entry, bundle.sha256) for bundle in bundles),
        variable_names=tuple(sorted(variables.values)),
        secret_names=tuple(sorted(variables.secrets)),
    )
    along = replace(along, environment=environment, code=bundles, elsewhere=True)
    return _noted(spec, notes), variables.values, along


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
    from sgpu_magic.packages.order import chosen

    found = chosen(settings, wishes.env_version, torch_mine=wishes.torch_mine, allow_build=wishes.allow_build)
    if found is None:
        return None
    driver = _driver(pool) if wishes.torch_mine else ""
    return found.environment, (*found.notes, *check_before_travel(found.environment, driver=driver))


def _own(pool: Pool, submission: Submission) -> tuple[tuple[Environment, tuple[str, ...]], tuple[str, ...]]:
    """The notebook's own packages, and the directories of projects of which wheels were made."""
    wishes = submission.wishes
    ordered = packages.of(pool).environment(torch_mine=wishes.torch_mine, allow_build=wishes.allow_build)
    snapshot = take_snapshot()
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
    submission: Submission,
    cell: CellSource,
    environment: Environment | None,
    known: Iterable[str] = (),
    projects: tuple[str, ...] = (),
) -> list[LocalCode]:
    """The user's own modules that a run needs.

    Args:
        submission: The run.
        cell: Its cell with nothing blanked.
        environment: The ranks' packages.
        known: Modules that its session's ranks have already.
        projects: Directories of projects that they have wheels of.

    Raises:
        SerializationError: The payload needs modules that neither these nor the packages have.
    """
    from sgpu_magic.packages.local_code import find_local_code

    stand = submission.stand
    cwd = stand.cwd if stand is not None else working_directory()
    path = stand.sys_path if stand is not None else tuple(entry or cwd for entry in sys.path)
    sources = [cell.body, *(source for _, source, _ in cell.linecache), *_files(submission.packed.files)]
    imports = (f"import {name}" for name in known)
    code = find_local_code(path, [*sources, *imports], elsewhere=projects, cwd=cwd)
    check_references(submission.packed.modules, code, environment, projects=projects)
    return code


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


def _bundled(settings: Settings, code: list[LocalCode]) -> tuple[tuple[CodeBundle, ...], tuple[str, ...]]:
    """Local code as archives, and what to say of their size."""
    from sgpu_magic.packages.code_files import Bundles
    from sgpu_magic.packages.local_code import check_size

    notes = check_size(code, warn_bytes=settings.code_warn_bytes, limit_bytes=settings.code_limit_bytes)
    folder = settings.state_path / _BUNDLES
    bundles = _bundles.setdefault(folder, Bundles(folder))
    return tuple(bundles.bundle(each) for each in code), notes


def _with_environment(spec: RunSpec, environment: Environment, notes: tuple[str, ...]) -> RunSpec:
    spec = msgspec.structs.replace(spec, environment=environment.digest, environment_label=environment.label)
    return _noted(spec, notes)


def _noted(spec: RunSpec, notes: tuple[str, ...]) -> RunSpec:
    if not notes:
        return spec
    shipped = msgspec.structs.replace(spec.shipped, notes=(*spec.shipped.notes, *notes))
    return msgspec.structs.replace(spec, shipped=shipped)
