"""`sgpu doctor`: checks everything that a run needs on this machine, and gives the remedy for each problem.

Starts no pool and changes nothing, except that `--pool` prepares a machine over ssh as the first run there would. Each
check prints one line as soon as it is done.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TextIO

from sgpu_magic import __version__
from sgpu_magic.cli import machine_checks, pool_checks, python_checks
from sgpu_magic.cli.finding import Finding, Level, ok, problem, warning
from sgpu_magic.cli.json_form import text_or_none
from sgpu_magic.cli.json_records import DoctorReport, FindingRow, encode
from sgpu_magic.cli.main import CommandParser, add_json
from sgpu_magic.client.pool import Pool
from sgpu_magic.client.pool_choosing import describe_devices
from sgpu_magic.client.pools import Pools, PoolStatusReply
from sgpu_magic.client.pools_file import LOCAL, read_pools, unknown_pool
from sgpu_magic.client.this_machine import left_by_pool, own_key_path, running_pool
from sgpu_magic.config import Settings, config_path, load_settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.files.preload_report import read_report
from sgpu_magic.files.run_directory import disk_room
from sgpu_magic.files.run_directory import remedy as remedy_for_disk
from sgpu_magic.formatting import count_of, format_bytes
from sgpu_magic.suggestions import did_you_mean
from sgpu_magic.system.processes import stopped_below
from sgpu_magic.system.secure_sockets import read_key_pair
from sgpu_magic.views import ansi
from sgpu_magic.wire.pool_status import MAX_SOCKET_PATH_BYTES, PROTOCOL_VERSION, PoolStatus, socket_file

_NAME_WIDTH = 20
_LEVEL_WIDTH = 7
# SGPU_RUN_ID is set in a run's processes, SGPU_JOB in the notebook of `sgpu run`
_OTHER_VARIABLES = ("SGPU_CONFIG", "SGPU_JOB", "SGPU_RUN_ID")
_NETWORK_TYPES = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p")
)
_LITTLE_BYTES = 1_000_000_000
_HARDLY_ANY_BYTES = 50_000_000


def run(found: Iterable[Finding], out: TextIO) -> bool:
    """Write findings as they are made.

    Args:
        found: The findings.
        out: Stream for them, flushed after each line.

    Returns:
        False if there is a problem.
    """
    counts = dict.fromkeys(Level, 0)
    for finding in found:
        counts[finding.level] += 1
        out.write(line(finding) + "\n")
        out.flush()
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    totals = [count_of(problems, "problem") if problems else "no problem"]
    totals += [count_of(warnings, "warning")] if warnings else []
    out.write(f"\n{', '.join(totals)}\n")
    return problems == 0


def findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of all checks, in the order of the output."""
    yield from _guarded("python", python_checks.python_version)
    facts = python_checks.probe(environ)
    yield from python_checks.packages(facts)
    yield from _guarded("packages", python_checks.mismatches)
    yield from _guarded("requirements", python_checks.requirements)
    yield from python_checks.group(facts)
    yield from _guarded("hostname", machine_checks.hostname)
    settings, found = settings_file(environ)
    yield from found
    yield from variables(environ)
    yield from _guarded("gpu", lambda: python_checks.gpus(facts, settings.simulate))
    yield from machine_checks.visible_devices(environ)
    yield from _guarded("state directory", lambda: state_directory(settings))
    yield from _guarded("runtime directory", lambda: runtime_directory(settings))
    yield from _guarded("pool", lambda: pool(settings))
    yield from _guarded("preload", lambda: preloaded(settings))
    yield from _guarded("pools", lambda: listed_pools(settings))
    yield from _guarded("memory files", machine_checks.memory_files)
    yield from _guarded("process control", machine_checks.process_control)
    yield from _guarded("limits", machine_checks.limits)


def line(finding: Finding) -> str:
    """Return a finding as text, with its remedy on the next line."""
    head = f"{finding.level.value:<{_LEVEL_WIDTH}}  {finding.name:<{_NAME_WIDTH}}  "
    text = f"{head}{ansi.plain(finding.text)}"
    return f"{text}\n{'':<{len(head)}}{ansi.plain(finding.remedy)}" if finding.remedy else text


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Run one check. An `OSError` becomes a warning, so that the other checks still run."""
    try:
        yield from check()
    except OSError as error:
        yield warning(name, f"could not be checked: {error}", "See the system's error message.")


# ---------------------------------------------------------------- settings, directories, pools


def settings_file(environ: Mapping[str, str]) -> tuple[Settings, list[Finding]]:
    """Return the settings, and findings about `config.toml` and the variables.

    Settings that can't be read have their defaults, except for the directories.
    """
    try:
        settings = load_settings(environ)
    except UsageError as error:
        state_dir, runtime_dir = environ.get("SGPU_STATE_DIR", ""), environ.get("SGPU_RUNTIME_DIR", "")
        return Settings(state_dir=state_dir, runtime_dir=runtime_dir), [problem("settings", error.message)]
    path = config_path(environ)
    if path.is_file():
        return settings, [ok("settings", str(path))]
    if environ.get("SGPU_CONFIG"):
        text = f"SGPU_CONFIG names {path}, which does not exist: the defaults apply"
        return settings, [warning("settings", text, "Unset it, or create the file.")]
    return settings, [ok("settings", "the defaults (there is no config.toml)")]


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check for unknown `SGPU_*` variables."""
    known = [*(f"SGPU_{name.upper()}" for name in Settings.__struct_fields__), *_OTHER_VARIABLES]
    for name in sorted(environ):
        if name.startswith("SGPU_") and name not in known:
            remedy = did_you_mean(name, known) or f"The variables are: {', '.join(sorted(known))}."
            yield warning("variables", f"{name} is not a variable of sgpu-magic", remedy)


def state_directory(settings: Settings) -> Iterator[Finding]:
    """Check the state directory: owner, write access, file system type, free space."""
    path = settings.state_path
    base = _nearest(path)
    remedy = "Make it a writable directory that you own, or set SGPU_STATE_DIR to one on a local disk."
    if why := _not_usable(path):
        yield problem("state directory", f"{path} {why}", remedy)
        return
    room = disk_room(base)
    if not room.takes_a_run:
        yield problem("disk", f"no run can be recorded in {path}: {room}", remedy_for_disk(settings.runs_path, room))
        return
    if why := _not_writable(base):
        yield problem("state directory", f"{path} {why}", remedy)
        return
    kind = room.kind
    if kind in _NETWORK_TYPES or kind.startswith("fuse."):
        text = f"{path} is on a network file system ({kind}): the ledger's locks may fail, logs are slow"
        yield warning("state directory", text, "Set SGPU_STATE_DIR to a directory on a local disk.")
    else:
        yield ok("state directory", f"{path}" + (f" ({kind})" if kind else ""))
    if room.free_bytes < _LITTLE_BYTES:
        text = f"{format_bytes(room.free_bytes)} free for logs and payloads"
        say = problem if room.free_bytes < _HARDLY_ANY_BYTES else warning
        yield say("disk", text, f"Free space there; old runs in {settings.runs_path} can be removed.")
    else:
        yield ok("disk", f"{format_bytes(room.free_bytes)} free for logs and payloads")
    if aside := sorted(path.glob("ledger.sqlite3.*-[0-9]*")):
        text = f"{aside[-1]} could not be used and was moved aside"
        yield warning("ledger", text, "Remove it if you no longer need it.")


def runtime_directory(settings: Settings) -> Iterator[Finding]:
    """Check the runtime directory: length of the socket's path, owner, mode."""
    name, path = "runtime directory", settings.runtime_path
    size = len(os.fsencode(socket_file(path)))
    if size > MAX_SOCKET_PATH_BYTES:
        text = f"{path} is too long: the path of its socket has {size} bytes, more than {MAX_SOCKET_PATH_BYTES}"
        yield problem(name, text, "Set SGPU_RUNTIME_DIR to a shorter directory.")
    elif why := _not_usable(path) or _not_writable(_nearest(path)):
        yield problem(name, f"{path} {why}", "Remove it, or set SGPU_RUNTIME_DIR to a directory that is yours.")
    elif path.exists() and (mode := stat.S_IMODE(path.stat().st_mode)) != 0o700:
        text = f"{path} has mode {mode:04o}, so others can access it; the next pool sets it to 0700"
        yield warning(name, text, f"`chmod 700 {path}`.")
    else:
        yield ok(name, f"{path}")


def pool(settings: Settings) -> Iterator[Finding]:
    """Check the local pool: is it running, does it answer, is it of this version, has a dead one left files."""
    try:
        address = running_pool(settings)
    except PoolError as error:
        yield problem("pool", error.message)
        return
    if address is None:
        left = [str(file) for file in left_by_pool(settings) if file.exists()]
        if left:
            text = f"none is running, but one that was killed left {' and '.join(left)}"
            yield warning("pool", text, "Nothing to do: the next pool removes that.")
        else:
            yield ok("pool", "none is running; the first %%distributed cell starts one")
        return
    try:
        with closing(Pool(settings)) as client:
            status = client.status(recent=0, start=False)
    except PoolError as error:
        yield problem("pool", error.message)
        return
    if status is None:
        yield ok("pool", "it has just ended")
        return
    text = f"process {status.pid}, sgpu-magic {status.package_version}, protocol {PROTOCOL_VERSION}"
    if status.package_version != __version__:
        remedy = "`sgpu pool stop` when it is idle; the next run starts one of this version."
        yield warning("pool", f"{text}, but this is sgpu-magic {__version__}", remedy)
    elif stopped := _stopped_processes(status):
        pids = " ".join(map(str, stopped))
        why = f"{text}. Of its processes, a signal or a debugger has stopped {pids}"
        yield problem("pool", why, f"`kill -CONT {pids}` continues what is stopped.")
    else:
        # this command is one of the clients
        yield ok("pool", f"{text}, {count_of(max(0, status.clients - 1), 'client')}")


def preloaded(settings: Settings) -> Iterator[Finding]:
    """Say what the pool has executed ahead for the next runs, what of their imports it has not, and why."""
    for row in read_report(settings.state_path):
        about = f"{', '.join(row.roots)}: {row.modules:,} modules, {format_bytes(row.bytes)}, in process {row.pid}"
        refused = "".join(f"; {name} {why}" for name, why in row.refused.items())
        yield ok("preload", f"{about}{refused}")


def _stopped_processes(status: PoolStatus) -> list[int]:
    """Return the stopped ones of the pool, its agents and their zygotes, but no ranks: the agent stops those itself."""
    below = stopped_below(status.pid, 2)
    # an agent that outlived an earlier pool is no child of this one
    adopted = [] if status.agent_pid is None else stopped_below(status.agent_pid, 1)
    return sorted({*below, *adopted})


def _nearest(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _not_usable(path: Path) -> str:
    if not os.path.lexists(path):
        return ""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return "is a link, and private files are not kept behind links"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    return "belongs to another user" if status.st_uid != os.getuid() else ""


def _not_writable(directory: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return f"can't be written: {error.strerror}"


def listed_pools(settings: Settings) -> Iterator[Finding]:
    """Check the list of pools, the user's key, and each listed pool. Takes 3 s at most. Nothing without a list."""
    try:
        entries = read_pools()
    except UsageError as error:
        yield problem("pools", error.message)
        return
    if not entries:
        return
    yield from _key()
    yield from machine_checks.encryption()
    with closing(Pools(settings)) as pools:
        yield from map(_pool_finding, pools.ask_status(entries, local=False, again=True))


def _key() -> Iterator[Finding]:
    path = own_key_path()
    try:
        read_key_pair(path)
    except FileNotFoundError:
        remedy = "`sgpu pool keygen` creates one; send its public half to the pools' operator."
        yield problem("key", f"there is none ({path}), and pools on other machines accept only listed keys", remedy)
    except UsageError as error:
        yield problem("key", error.message)
    else:
        yield ok("key", str(path))


def _pool_finding(answer: PoolStatusReply) -> Finding:
    name = f"pool {answer.name}"[:20]
    status = answer.status
    if status is None:
        return problem(name, answer.problem)
    text = f"{answer.entry.address if answer.entry else ''} has {describe_devices(status)}"
    if status.package_version != __version__:
        remedy = "They work together unless a request is refused; the same version on both sides is best."
        return warning(name, f"{text}, but runs sgpu-magic {status.package_version}, and this is {__version__}", remedy)
    return ok(name, text)


def report(found: Sequence[Finding]) -> DoctorReport:
    """Return findings in the form of `--json`."""
    levels = Counter(finding.level for finding in found)
    return DoctorReport(
        findings=tuple(
            FindingRow(
                level=finding.level.value,
                name=finding.name,
                text=ansi.plain(finding.text),
                remedy=text_or_none(finding.remedy),
            )
            for finding in found
        ),
        problems=levels[Level.PROBLEM],
        warnings=levels[Level.WARNING],
    )


def _options(parser: CommandParser) -> None:
    parser.add_argument(
        "--pool",
        default=LOCAL,
        metavar="NAME",
        help="check the way to a pool of the list, and a machine over ssh as its first run would find it",
    )
    add_json(parser)
    parser.does(_run)


def _run(options: argparse.Namespace) -> int:
    found = findings(os.environ) if options.pool == LOCAL else _of_pool(options.pool)
    if not options.json:
        return 0 if run(found, sys.stdout) else 1
    made = report(list(found))
    sys.stdout.write(f"{encode(made)}\n")
    return 1 if made.problems else 0


def _of_pool(name: str) -> Iterator[Finding]:
    entries = read_pools()
    entry = next((each for each in entries if each.name == name), None)
    if entry is None:
        raise unknown_pool(name, [each.name for each in entries])
    return pool_checks.findings(load_settings(), entry)


COMMANDS = {"doctor": _options}
