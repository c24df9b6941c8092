"""Reads a run's directory and prepares its replay. Nothing is unpickled here."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from sgpu_magic.client.run import WorkingContext
from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.files.run_directory import EventFile
from sgpu_magic.options.option_records import EnvironmentOptions, ReplayOptions
from sgpu_magic.payload.pack import Packed
from sgpu_magic.payload.unpack import map_kept
from sgpu_magic.runs.kernel_context import KernelContext
from sgpu_magic.runs.replay import circumstances
from sgpu_magic.runs.submit.spec import PackedCode, Submission, describe
from sgpu_magic.runs.submit.target import ResolvedTarget
from sgpu_magic.wire.attachments import PackedLayout
from sgpu_magic.wire.base import RunKind, short
from sgpu_magic.wire.decoding import decode_json
from sgpu_magic.wire.events import Described, RanksStarted, RunEnded, as_warning
from sgpu_magic.wire.files import KEY, REQUIREMENTS
from sgpu_magic.wire.run import RUN_RECORD, UNDER_WAY, RunRecord, RunSpec

_REPLAYABLE = (RunKind.CELL, RunKind.CALL)
# options that a replay takes from the recorded spec
_AS_RECORDED = ("grace_s", "retries", "retry_on_any", "profile", "max_cost", "ray")
# a payload is copied about 2 s after the run's end
_PATIENCE_S = 10.0
_PAUSE_S = 0.05


class Recorded(msgspec.Struct, frozen=True):
    """A run as recorded in its directory.

    Args:
        directory: The run's directory.
        record: The content of `run.json`.
        packed: The payload; its buffers are views of the file.
        key: The payload's HMAC key.
        tags: Tags that were added after the submission, such as the git commit.
    """

    directory: Path
    record: RunRecord
    packed: Packed
    key: bytes
    tags: dict[str, str]

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def requirements(self) -> Path | None:
        """Path of the requirements file with the pins of its packages, None if there is none."""
        path = self.directory / REQUIREMENTS
        return path if path.is_file() else None


def read_recorded(directory: Path) -> Recorded:
    """Read a run's directory. Waits up to 10 s for the files of a run that has just ended.

    Raises:
        UsageError: The run can't be replayed; the message says what is missing and why.
    """
    run = short(directory.name)
    record, logged = _read_record(directory), _read_log(directory)
    if logged.ended and (logged.started or record is not None):
        # these files are written after the result has been sent, so as not to delay it
        deadline = time.monotonic() + _PATIENCE_S
        while _is_under_way(record) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            record = _read_record(directory)
    if record is None:
        if logged.started:
            raise UsageError(
                f"run {run} can't be replayed yet: its directory {directory} has no {RUN_RECORD}, which a cell of a "
                "session gets when it has ended."
            )
        raise UsageError(
            f"run {run} can't be replayed: its ranks never started, so its directory {directory} has no {RUN_RECORD}. "
            "Run its cell again."
        )
    if record.spec.kind not in _REPLAYABLE:
        raise UsageError(f"run {run} is a {record.spec.kind.value}: only cells and calls of functions can be replayed.")
    if not record.payload_kept:
        raise UsageError(
            f"run {run} can't be replayed: its variables are not in {directory}: {record.payload_note}. Run its cell "
            "again; the setting keep_payload says how large a payload is kept."
        )
    try:
        key = (directory / KEY).read_bytes()
        packed = _packed(directory, record.payload_layout, record.spec.shipped.names)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"run {run} can't be replayed: its variables in {directory} can't be read ({error}). Run its cell again."
        ) from None
    return Recorded(directory, record, packed, key, _read_log(directory).tags)


def _read_record(directory: Path) -> RunRecord | None:
    """Read `run.json`; None if it does not exist yet."""
    path = directory / RUN_RECORD
    try:
        return decode_json(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"run {short(directory.name)} can't be replayed: {path} can't be read ({error}). Run its cell again."
        ) from None


def _is_under_way(record: RunRecord | None) -> bool:
    """Whether the record or payload is missing without a recorded reason."""
    return record is None or (not record.payload_kept and record.payload_note == UNDER_WAY)


def _packed(directory: Path, layout: PackedLayout, names: tuple[str, ...]) -> Packed:
    whole = memoryview(map_kept(directory, layout))
    end = max((offset + length for offset, length in layout.buffers), default=layout.pickle_size)
    buffers = [whole[offset : offset + length] for offset, length in layout.buffers]
    return Packed(bytes(whole[: layout.pickle_size]), buffers, layout, names, {}, end)


class _LoggedRun(msgspec.Struct):
    """What a run's events say about it.

    Args:
        started: Whether its ranks started.
        ended: Whether it ended.
        tags: As in `Recorded`.
    """

    started: bool = False
    ended: bool = False
    tags: dict[str, str] = msgspec.field(default_factory=dict[str, str])


def _read_log(directory: Path) -> _LoggedRun:
    logged = _LoggedRun()
    # of a damaged log, the events before the damage are used
    with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
        for event, _ in EventFile(directory).new_events():
            logged.started |= isinstance(event.body, RanksStarted)
            logged.ended |= isinstance(event.body, RunEnded)
            if isinstance(event.body, Described):
                logged.tags.update(event.body.tags)
    return logged


# ---------------------------------------------------------------- submission


def prepare_replay(context: KernelContext, recorded: Recorded, options: ReplayOptions) -> Submission:
    """Build the submission that replays a recorded run; its notes list the differences. Starts nothing.

    Args:
        context: The kernel's context.
        recorded: The run.
        options: Options that replace the recorded ones.

    Raises:
        UsageError: A variable that `--env` set for the run is not set here.
        PoolError: The pool can't be reached or started.
    """
    spec = recorded.spec
    kept_settings = context.pool.apply_settings()
    missing = [name for name in spec.env_names if name not in os.environ and name not in options.variables]
    if missing:
        listed, first = ", ".join(missing), missing[0]
        raise UsageError(
            f"run {short(spec.run_id)} was given the variables {listed} by --env, whose values are never written down, "
            f"and they are not set here. Set them before the replay, or add --env {first}=VALUE."
        )
    then = circumstances.of_run(recorded)
    chosen = circumstances.choose(recorded, then.digest, here=options.here)
    cwd = recorded.record.cwd if Path(recorded.record.cwd).is_dir() else os.getcwd()
    now = circumstances.of_replay(chosen, cwd, then.packages)
    notes = [f"a replay of run {short(spec.run_id)}", *circumstances.differences(then, now), *_missing_variables(spec)]
    if spec.session:
        notes.append("it ran in a session: what earlier cells had set on its ranks is not here")
    notes += [as_warning(kept_settings)] if kept_settings else []
    notes += filter(None, [context.pool.new_simulation()])
    placement = replace(
        spec.placement,
        ranks=options.ranks or len(spec.rank_numbers),
        device_type=options.device_type or spec.placement.device_type,
        stand_in=bool(context.current_settings().stand_in),
    )
    code = PackedCode(
        spec.kind,
        spec.name,
        spec.cell,
        recorded.packed,
        recorded.key,
        spec.outputs,
        replace(spec.shipped, seconds=0.0, notes=()),
        spec.parameters,
    )
    given = {name: os.environ.get(name, "") for name in spec.env_names}
    asked = replace(
        options,
        variables={**given, **options.variables},
        timeout_s=options.timeout_s or spec.timeout_s or SEVEN_DAYS_S,
        environment=EnvironmentOptions(env_version=chosen.env_version, allow_build=True)
        if chosen.env_version
        else EnvironmentOptions(),
        group=spec.grouped,
        **{name: getattr(spec, name) for name in _AS_RECORDED},
    )
    submission = describe(context, code, asked, ResolvedTarget(context.pool, placement, tuple(notes)))
    # the digest of another interpreter's packages is already known
    environment = chosen.digest if chosen.interpreter is not None else ""
    return replace(
        submission,
        spec=replace(submission.spec, environment=environment, replay_of=spec.run_id),
        interpreter=chosen.interpreter,
        working_context=WorkingContext(cwd, circumstances.path_of(recorded, chosen)),
    )


def _missing_variables(spec: RunSpec) -> list[str]:
    """Return a note about variables that were sent with the run and are not set here."""
    travelled = (*spec.variable_names, *spec.secret_names)
    missing = sorted({name for name in travelled if name not in os.environ and name not in spec.env_names})
    return [f"variables that the run had and that are not set here: {', '.join(missing)}"] if missing else []
