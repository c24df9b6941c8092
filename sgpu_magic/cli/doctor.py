"""`sgpu doctor`: looks at all that a run needs on this machine, and names the remedy for what is wrong.

It starts no pool and changes nothing. Each check says what it found in one line, as soon as it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO

from sgpu_magic.cli import machine_checks, place_checks, python_checks
from sgpu_magic.cli.finding import Finding, Level, warning
from sgpu_magic.views import ansi
from sgpu_magic.views.units import count_of

_NAME_WIDTH = 20
_LEVEL_WIDTH = 7


def run(environ: Mapping[str, str], out: TextIO) -> bool:
    """Write all findings to `out`.

    Args:
        environ: The variables that settings and checks read.
        out: Where to; flushed after each line.

    Returns:
        False when there is a problem.
    """
    counts = dict.fromkeys(Level, 0)
    for finding in findings(environ):
        counts[finding.level] += 1
        out.write(line(finding) + "\n")
        out.flush()
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    told = [count_of(problems, "problem") if problems else "no problem"]
    told += [count_of(warnings, "warning")] if warnings else []
    out.write(f"\n{', '.join(told)}\n")
    return problems == 0


def findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what each check finds, in the order in which a person reads it."""
    yield from _guarded("python", python_checks.python_version)
    facts = python_checks.probe(environ)
    yield from python_checks.packages(facts)
    yield from _guarded("packages", python_checks.mismatches)
    yield from _guarded("ipykernel", python_checks.ipykernel_version)
    yield from python_checks.group(facts)
    yield from _guarded("hostname", machine_checks.hostname)
    settings, found = place_checks.settings_file(environ)
    yield from found
    yield from place_checks.variables(environ)
    yield from _guarded("gpu", lambda: machine_checks.gpus(facts, settings.simulate))
    yield from machine_checks.visible_devices(environ)
    yield from _guarded("state directory", lambda: place_checks.state_directory(settings))
    yield from _guarded("runtime directory", lambda: place_checks.runtime_directory(settings))
    yield from _guarded("pool", lambda: place_checks.pool(settings))
    yield from _guarded("pools", lambda: place_checks.listed_pools(settings))
    yield from _guarded("ray", place_checks.ray_version)
    yield from _guarded("memory files", machine_checks.memory_files)
    yield from _guarded("process control", machine_checks.process_control)
    yield from _guarded("limits", machine_checks.limits)


def line(finding: Finding) -> str:
    """Return a finding as text, its remedy in a line below."""
    head = f"{finding.level.value:<{_LEVEL_WIDTH}}  {finding.name:<{_NAME_WIDTH}}  "
    text = f"{head}{ansi.plain(finding.text)}"
    return f"{text}\n{'':<{len(head)}}{ansi.plain(finding.remedy)}" if finding.remedy else text


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """One check that the system lets down does not take the others with it."""
    try:
        yield from check()
    except OSError as error:
        yield warning(name, f"could not be looked at: {error}", "See what the system says about it.")
