"""Submits a run to its pool with the packages, code, variables and files that it needs there.

If the nodes see this machine's files and no other packages are requested, nothing is collected: less than 0.1 ms.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sgpu_magic.client.pool import Pool
from sgpu_magic.client.run import Attachments, ClientRun
from sgpu_magic.config import Settings
from sgpu_magic.errors import RunCancelled, UsageError
from sgpu_magic.options import notebook_job
from sgpu_magic.options.option_records import OWN_PACKAGES, EnvironmentOptions
from sgpu_magic.packages.environment_variables import travelling
from sgpu_magic.packages.module_references import check_references, check_versions
from sgpu_magic.packages.secrets import SecretsOf, blanked_settings
from sgpu_magic.packages.snapshot import take_snapshot
from sgpu_magic.packages.travel import check_before_travel, new_mismatches
from sgpu_magic.runs import packages
from sgpu_magic.runs.git_state import report_git_state
from sgpu_magic.runs.notebook import working_directory
from sgpu_magic.runs.submit.cell_name import cell_name
from sgpu_magic.runs.submit.spec import Submission
from sgpu_magic.runs.submit.tracking_target import MOVE_NAMES, tracking_of
from sgpu_magic.wire.attachments import CodeBundle, Environment, Upload
from sgpu_magic.wire.base import CancelReason, RunKind, short
from sgpu_magic.wire.client import Describe, TrackRun
from sgpu_magic.wire.codec import printable
from sgpu_magic.wire.events import Placed, as_warning
from sgpu_magic.wire.option_text import OptionName, text_of
from sgpu_magic.wire.run import CellSource, RunSpec

if TYPE_CHECKING:
    from sgpu_magic.packages.code_files import Bundles
    from sgpu_magic.packages.local_code import LocalCode

_BUNDLES = "bundles"
_MOST_SESSIONS = 50

_secrets = SecretsOf()
_secrets_lock = threading.Lock()

# by session: local modules that its ranks have, and directories of projects whose wheels they have; later cells may
# import them too
_sent: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {}
# by session: the packages that its ranks have, if they are not this process's own
_environments: dict[str, Environment] = {}


def submit(pool: Pool, submission: Submission, *, waits: bool = False, placed: Placed | None = None) -> ClientRun:
    """Submit a run to its pool, with the packages, code, variables and files that it needs there.

    Args:
        pool: The pool.
        submission: The run.
        waits: The calling thread waits for the run's end next.
        placed: As in `Pool.submit`.

    Raises:
        UsageError: This process belongs to a rank of a run.
        RunCancelled: The submission was interrupted.
        SgpuError: As `Pool.submit`.
    """
    if parent := os.environ.get("SGPU_RUN_ID", ""):
        # each rank would submit a run, and all would wait for devices that this run holds
        raise UsageError(
            f"rank {os.environ.get('RANK', '0')} of run {short(parent)} tried to start run {submission.spec.name}, but "
            "a run can't start another: it could wait for devices that it holds itself. Submit it from the notebook or "
            "from a program that runs once (`sgpu run` does that with a script that has @distributed functions); on a "
            "rank call the function itself, without `.distributed`."
        )
    try:
        settings = pool.settings
        spec, environ, along = _inputs_of(pool, settings, submission)
        spec, tracking = tracking_of(settings, notebook_job.limited(printable(spec)), submission)
        # a session can be ended from another thread while this one waits
        spec = replace(spec, blocks_owner=waits and threading.current_thread() is threading.main_thread())
        uploads, notes = _uploads_of(submission, settings, along)
        spec, along = spec.with_notes(notes), replace(along, tracking=tracking, uploads=uploads)
        run = pool.submit(spec, submission.packed, submission.key, environ, along, placed)
    except KeyboardInterrupt:
        raise RunCancelled("interrupted before the pool had accepted the run; nothing was started.") from None
    try:
        packages.packages_of(pool).send_descriptions(spec.environment, along.environment)
        if tracking is not None:
            run.ask_tracked = lambda: pool.notify(TrackRun(run_id=run.run_id, tracking=tracking))
            cwd = submission.working_context.cwd if submission.working_context is not None else working_directory()
            report_git_state(cwd, lambda tags: pool.notify(Describe(run_id=run.run_id, tags=tags)))
    except KeyboardInterrupt:
        error = interrupted(run)
        release(pool, run)
        raise error from None
    return run


def interrupted(run: ClientRun) -> RunCancelled:
    """Cancel a run that was interrupted before it was followed; return the exception to raise."""
    run.cancel(CancelReason.INTERRUPT)
    return RunCancelled(f"run {short(run.run_id)} was interrupted as it started.", run_id=run.run_id)


def release(pool: Pool, run: ClientRun) -> None:
    """Release a run that this process is done with: stop following it and free its payload memory for reuse.

    Ranks of a session keep their payloads mapped, so that memory is never written again.
    """
    if run.spec.in_session:
        pool.give_payload_up(run.run_id)
    else:
        pool.reuse_payload(run.run_id)
    run.close()


# ---------------------------------------------------------------- what its ranks need


def _inputs_of(pool: Pool, settings: Settings, submission: Submission) -> tuple[RunSpec, dict[str, str], Attachments]:
    """Collect what the run's ranks need and the pool's nodes may lack.

    Args:
        pool: The pool.
        settings: Its current settings.
        submission: The run.

    Returns:
        The spec with the digests of the attachments and without secrets, the ranks' variables, and the attachments.

    Raises:
        EnvironmentFailed: The packages are known not to be available there.
        SerializationError: The payload needs modules that can't be shipped.
        UsageError: `--env-version` does not name an environment.
        PoolError: The pool can't be started or reached.
    """
    spec, cell = _without_secrets(submission.spec, submission.environ, submission.given)
    along = Attachments(interpreter=submission.interpreter, working_context=submission.working_context, cell=cell)
    # a session stays where it is, also while its pool service is being replaced
    source, is_remote = cell or spec.cell, not (pool.saw_client if spec.in_session else pool.sees_client)
    session = spec.session if spec.in_session else spec.run_id
    modules, projects = _sent.get(session, (frozenset[str](), ()))
    environment: Environment | None = None
    notes: tuple[str, ...] = ()
    if not spec.in_session and (is_remote or submission.interpreter is None):
        if (found := _packages_of(pool, settings, submission.environment, is_remote=is_remote)) is not None:
            environment, notes, projects = found
        else:
            spec = replace(spec, environment=packages.packages_of(pool).digest_for(spec.run_id))
            notes = tuple(map(as_warning, [*_without_effect(submission.environment), *new_mismatches()]))
    if (installed := environment or _environments.get(session)) is not None:
        check_versions(submission.packed.modules, installed)
    if environment is not None:
        if spec.kind is RunKind.SESSION:
            _environments[session] = environment
            while len(_environments) > _MOST_SESSIONS:
                del _environments[next(iter(_environments))]
        along = replace(along, environment=environment)
        spec = replace(spec, environment=environment.digest, environment_label=environment.label)
    if not is_remote:
        if environment is not None and not environment.resolve:
            # the ranks see this machine's files but have other packages: only check the imports
            _local_code(submission, source, environment)
        return spec.with_notes(notes), submission.environ, along
    variables = travelling(submission.environ, given=submission.given, chosen=settings.variables)
    code = _local_code(submission, source, environment, modules, projects)
    if spec.in_session or spec.kind is RunKind.SESSION:
        _sent[session] = (modules.union(name for each in code for name in each.modules), projects)
        while len(_sent) > _MOST_SESSIONS:
            del _sent[next(iter(_sent))]
    bundles, bundle_notes = _bundled(settings, code)
    spec = replace(
        spec,
        elsewhere=True,
        code=tuple((bundle.entry, bundle.sha256) for bundle in bundles),
        variable_names=tuple(sorted(variables.values)),
        secret_names=tuple(sorted(variables.secrets)),
    )
    return spec.with_notes((*notes, *bundle_notes)), variables.values, replace(along, code=bundles, is_remote=True)


def _without_secrets(
    spec: RunSpec, environ: Mapping[str, str], given: frozenset[str]
) -> tuple[RunSpec, CellSource | None]:
    """Redact secrets in the spec's source, parameters and name.

    Args:
        spec: The run's spec.
        environ: The ranks' variables; values of secret variables are redacted, as are known kinds of tokens.
        given: Names of the variables that `--env` sets, whose values are redacted too.

    Returns:
        The redacted spec and the source to execute; None instead of the source if nothing was redacted.
    """
    with _secrets_lock:
        blanker = _secrets.blanker(environ, given)
    cell = spec.cell
    redacted = replace(
        cell,
        body=blanked_settings(cell.body, blanker.clear),
        magic_line=blanker.clear(cell.magic_line),
        arguments=tuple(map(blanker.clear, cell.arguments)),
        linecache=tuple(
            (file, blanked_settings(source, blanker.clear), number) for file, source, number in cell.linecache
        ),
    )
    parameters = tuple((name, blanker.clear(value)) for name, value in spec.parameters)
    # a name that was made of the code is made of the redacted code: it may have cut a secret
    name = cell_name(redacted) if spec.name == cell_name(cell) else blanker.clear(spec.name)
    if redacted == cell and parameters == spec.parameters and name == spec.name:
        return spec, None
    return replace(spec, cell=redacted, parameters=parameters, name=name), cell


def _without_effect(environment: EnvironmentOptions) -> tuple[str, ...]:
    """Return a note about package options that have no effect because the ranks use the notebook's own Python."""
    given = {"--torch mine": environment.torch_mine, "--allow-build": environment.allow_build}
    asked = [option for option, is_given in given.items() if is_given]
    if not asked:
        return ()
    have = "have" if len(asked) > 1 else "has"
    return (
        f"{' and '.join(asked)} {have} no effect on this run: its ranks use the notebook's own Python, and nothing "
        "is installed for them",
    )


def _packages_of(
    pool: Pool, settings: Settings, environment: EnvironmentOptions, *, is_remote: bool
) -> tuple[Environment, tuple[str, ...], tuple[str, ...]] | None:
    """Return the packages that a node builds: the requested ones, or the notebook's own for a pool elsewhere.

    Returns:
        The packages, notes about them, and directories of projects that are shipped as wheels; None if nothing is
        built.
    """
    ordered, snapshot = None, None
    if (environment.env_version or settings.env_version) not in OWN_PACKAGES:
        # imported here: only needed for requested packages
        from sgpu_magic.packages.environment_request import find_named

        ordered = find_named(
            settings, environment.env_version, torch_mine=environment.torch_mine, allow_build=environment.allow_build
        )
    elif is_remote:
        ordered = packages.packages_of(pool).environment(
            torch_mine=environment.torch_mine, allow_build=environment.allow_build
        )
        snapshot = take_snapshot()
    if ordered is None:
        return None
    status = pool.status(recent=0) if environment.torch_mine else None
    driver = status.inventory.driver if status is not None else ""
    warnings = check_before_travel(ordered.environment, snapshot, driver=driver)
    wheels = {wheel.file.partition("-")[0].replace("_", "-").lower() for wheel in ordered.environment.wheels}
    there = snapshot.distributions if snapshot is not None else ()
    projects = (each.path for each in there if each.key in wheels and each.path is not None)
    notes = (*ordered.notes, *map(as_warning, warnings))
    return ordered.environment, notes, tuple(str(project) for project in projects if os.path.isdir(project))


def _local_code(
    submission: Submission,
    cell: CellSource,
    environment: Environment | None,
    known: Iterable[str] = (),
    projects: tuple[str, ...] = (),
) -> list[LocalCode]:
    """Return the user's own modules that a run needs.

    Args:
        submission: The run.
        cell: Its cell, not redacted.
        environment: The ranks' packages.
        known: Modules that the session's ranks already have.
        projects: Directories of projects whose wheels the ranks have.

    Raises:
        SerializationError: The payload needs modules that are in neither of them.
    """
    from sgpu_magic.packages.local_code import find_local_code

    working_context = submission.working_context
    cwd = working_context.cwd if working_context is not None else working_directory()
    path = working_context.sys_path if working_context is not None else tuple(entry or cwd for entry in sys.path)
    sources = [cell.body, *(source for _, source, _ in cell.linecache), *_files(submission.packed.files)]
    imports = (f"import {name}" for name in known)
    code = find_local_code(path, [*sources, *imports], projects=projects, cwd=cwd)
    check_references(submission.packed.modules, code, environment, projects=projects)
    return code


def _files(files: Iterable[str]) -> Iterable[str]:
    """Yield the sources of the files that define shipped functions, such as those of a script."""
    for file in files:
        # a cell or an interactive line is no real file
        with contextlib.suppress(OSError):
            yield Path(file).read_text(encoding="utf-8", errors="replace")


def _bundled(settings: Settings, code: list[LocalCode]) -> tuple[tuple[CodeBundle, ...], tuple[str, ...]]:
    """Return local code as archives, and warnings about their size."""
    from sgpu_magic.packages.local_code import check_size

    warnings = check_size(code, warn_bytes=settings.code_warn_bytes, limit_bytes=settings.code_limit_bytes)
    bundles = _bundles_in(settings.state_path / _BUNDLES)
    return tuple(bundles.bundle(each) for each in code), tuple(map(as_warning, warnings))


@functools.cache
def _bundles_in(folder: Path) -> Bundles:
    from sgpu_magic.packages.code_files import Bundles

    return Bundles(folder)


def _uploads_of(
    submission: Submission, settings: Settings, along: Attachments
) -> tuple[tuple[Upload, ...], tuple[str, ...]]:
    """Return a run's uploads, and notes about them: those requested, else the defaults of `sgpu run`, and named files.

    Raises:
        UsageError: A folder or file does not exist.
    """
    spec, uploads = submission.spec, submission.environment.uploads
    if spec.kind in MOVE_NAMES:
        return (), ()
    if not uploads and not spec.session:
        uploads = notebook_job.of_process().upload
    cwd = Path(submission.working_context.cwd) if submission.working_context is not None else Path(working_directory())
    by_themselves: tuple[Upload, ...] = ()
    notes: tuple[str, ...] = ()
    if along.is_remote and (submission.environment.files or settings.files) == "auto":
        from sgpu_magic.runs.submit.named_files import files_named_in

        named = files_named_in((along.cell or spec.cell).body, cwd, uploads)
        by_themselves = tuple(Upload(name="", path=str(cwd / name), below=name) for name in named.small)
        notes = tuple(named.notes())
    return (*(_upload(text, cwd) for text in dict.fromkeys(uploads)), *by_themselves), notes


def _upload(text: str, cwd: Path) -> Upload:
    path = os.path.normpath(cwd / os.path.expanduser(text))
    if not text.strip() or not os.path.exists(path):
        raise UsageError(
            text_of(OptionName("upload"), f" {text!r}: there is no such folder or file. Paths are relative to {cwd}.")
        )
    below = os.path.relpath(path, cwd)
    if below.split(os.sep, 1)[0] in (os.curdir, os.pardir):
        # the working directory itself, or a path outside of it
        below = ""
    return Upload(name=os.path.normpath(os.path.expanduser(text)), path=path, below=below)
