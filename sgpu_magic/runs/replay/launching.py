"""A recorded run becomes what is submitted again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sgpu_magic.client.submitter import Stand
from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.runs.notebook import owner
from sgpu_magic.runs.package_options import Wishes
from sgpu_magic.runs.replay import circumstances
from sgpu_magic.runs.replay.circumstances import differences
from sgpu_magic.runs.replay.recorded import Recorded
from sgpu_magic.runs.submit.submit import Submission
from sgpu_magic.runs.workplace import Workplace
from sgpu_magic.wire.ids import new_id, short
from sgpu_magic.wire.run import RunSpec


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What may differ from the run on purpose.

    Args:
        ranks: `--gpus`; None is as many as the run had.
        device_type: `--type`, canonical; None is what the run asked for.
        variables: `--env`.
        here: `--here`: this Python and its packages, whatever the run had.
        timeout_s: `--timeout` in seconds; None is the run's.
        detach: `--detach`.
        name: `--name`; "" is the run's.
        ui: `--ui`.
    """

    ranks: int | None = None
    device_type: str | None = None
    variables: dict[str, str] = field(default_factory=dict[str, str])
    here: bool = False
    timeout_s: float | None = None
    detach: bool = False
    name: str = ""
    ui: str = "auto"


def prepare_replay(place: Workplace, recorded: Recorded, options: ReplayOptions) -> Submission:
    """Make a submission of a recorded run. What differs from then stands in its notes. Nothing has started.

    Args:
        place: This process's.
        recorded: The run.
        options: What may differ.

    Raises:
        UsageError: A variable that the run was given is not set here.
        PoolError: The pool can't be reached or started.
    """
    spec = recorded.spec
    kept_settings = place.pool.apply_settings()
    missing = [name for name in spec.env_names if name not in os.environ and name not in options.variables]
    if missing:
        listed, first = ", ".join(missing), missing[0]
        raise UsageError(
            f"run {short(spec.run_id)} was given the variables {listed} by --env, whose values are never written down, "
            f"and they are not set here. Set them before the replay, or add --env {first}=VALUE."
        )
    chosen = circumstances.choose(recorded, here=options.here)
    cwd = recorded.record.cwd if Path(recorded.record.cwd).is_dir() else os.getcwd()
    then = circumstances.of_run(recorded)
    now = circumstances.of_replay(chosen, cwd, then.packages)
    notes = [f"a replay of run {short(spec.run_id)}", *differences(then, now), *_gone_variables(spec)]
    if spec.session:
        notes.append("it ran in a session: what earlier cells had set on its ranks is not here")
    notes += filter(None, [kept_settings])
    again = _spec_again(place, spec, options, tuple(notes))
    if chosen.interpreter is not None:
        again = msgspec.structs.replace(again, environment=chosen.digest)
    environ = {**os.environ, **options.variables}
    return Submission(
        again,
        recorded.packed,
        recorded.key,
        environ,
        wishes=Wishes(env_version=chosen.env_version, allow_build=True) if chosen.env_version else Wishes(),
        given=frozenset({*spec.env_names, *options.variables}),
        interpreter=chosen.interpreter,
        stand=Stand(cwd, circumstances.path_of(recorded, chosen)),
    )


def _spec_again(place: Workplace, spec: RunSpec, options: ReplayOptions, notes: tuple[str, ...]) -> RunSpec:
    ranks = options.ranks or len(spec.rank_numbers)
    device_type = options.device_type or spec.placement.device_type
    shipped = msgspec.structs.replace(spec.shipped, seconds=0.0, notes=notes)
    return RunSpec(
        run_id=new_id(),
        name=options.name or spec.name,
        cell=spec.cell,
        placement=msgspec.structs.replace(
            spec.placement,
            ranks=ranks,
            device_type=device_type,
            stand_in=place.current_settings().stand_in == "cpu",
        ),
        outputs=spec.outputs,
        owner=owner(place.shell),
        timeout_s=options.timeout_s or spec.timeout_s or SEVEN_DAYS_S,
        grace_s=spec.grace_s,
        retries=spec.retries,
        retry_any=spec.retry_any,
        detach=options.detach,
        env_names=tuple({*spec.env_names, *options.variables}),
        shipped=shipped,
        kind=spec.kind,
        parameters=spec.parameters,
        max_cost=spec.max_cost,
        profile=spec.profile,
        replay_of=spec.run_id,
    )


def _gone_variables(spec: RunSpec) -> list[str]:
    """Variables that had travelled with the run, and that are not set here."""
    travelled = (*spec.variable_names, *spec.secret_names)
    gone = sorted({name for name in travelled if name not in os.environ and name not in spec.env_names})
    return [f"variables that the run had and that are not set here: {', '.join(gone)}"] if gone else []
