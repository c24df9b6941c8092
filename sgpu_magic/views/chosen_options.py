"""The options that a run was submitted with, from its spec."""

from __future__ import annotations

from collections.abc import Iterator

from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.formatting import format_bytes, format_exact_span
from sgpu_magic.options.table import in_python
from sgpu_magic.wire.base import RunKind
from sgpu_magic.wire.devices import Placement
from sgpu_magic.wire.run import OutputName, RunSpec

_DEFAULT = Placement(ranks=1)


def chosen_options(spec: RunSpec) -> list[tuple[str, str]]:
    """Return each option that differs from its default, and its value; a switch has the value "".

    Options are spelled as the run's caller writes them: `--gpus`, or `gpus` for a function's. Of variables set by
    `--env`, only the names are known.
    """
    is_call = spec.kind is RunKind.CALL
    spelled = [(in_python(name) if is_call else f"--{name}", value) for name, value in _options(spec)]
    return [(name, "True" if is_call and not value else value) for name, value in spelled]


def _options(spec: RunSpec) -> Iterator[tuple[str, str]]:
    if not spec.session:
        yield from _devices(spec.placement)
    if spec.kind is not RunKind.CALL and spec.outputs:
        yield "out", ", ".join(map(_output, spec.outputs))
    if spec.session_name:
        yield "session", spec.session_name
    if spec.only:
        yield "ranks", ", ".join(map(str, spec.only))
    if spec.env_names:
        yield "env", ", ".join(spec.env_names)
    if spec.environment_label:
        yield "env-version", spec.environment_label
    if spec.timeout_s != SEVEN_DAYS_S:
        yield "timeout", format_exact_span(spec.timeout_s)
    for name, seconds in (("wait", spec.wait_s), ("grace", spec.grace_s), ("idle", spec.idle_s)):
        if seconds is not None:
            yield name, format_exact_span(seconds)
    if spec.retries:
        yield "retries", str(spec.retries)
    if spec.retry_on_any:
        yield "retry-on", "any"
    if spec.max_cost is not None:
        yield "max-cost", f"{spec.max_cost:g}"
    switches = {
        "detach": spec.detach,
        "fresh": spec.fresh,
        "reload": spec.reload,
        "profile": spec.profile,
        "group": spec.grouped,
    }
    yield from ((name, "") for name, is_set in switches.items() if is_set)


def _devices(placement: Placement) -> Iterator[tuple[str, str]]:
    yield "gpus", str(placement.ranks)
    if placement.device_type != _DEFAULT.device_type:
        yield "type", placement.device_type
    if placement.min_memory_bytes:
        yield "min-memory", format_bytes(placement.min_memory_bytes)
    if placement.nodes:
        yield "nodes", str(placement.nodes)
    if placement.strategy != _DEFAULT.strategy:
        yield "placement", placement.strategy
    if placement.allow_busy:
        yield "allow-busy", ""


def _output(output: OutputName) -> str:
    return f"{output.name}:all" if output.all_ranks else output.name
