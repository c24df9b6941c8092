# ruff: noqa: T201
"""Run the tests and report which lines and branches of the package they cover, in all processes.

    python scripts/measure_coverage.py [--html] [ARGUMENT OF PYTEST]...

The exit status is pytest's. Writes `coverage.json` and the data file for `coverage report` to `build/coverage`, with
`--html` also HTML pages. Tests are slower under measurement; lines covered by a test that then times out still count.

While the tests run, a .pth file makes every process of this environment that has `VARIABLE` set run this file, which
measures the process and all that it forks. coverage's own support for subprocesses is not enough: its variables do not
reach zygotes, which start with few variables besides those that begin with `PYTHON`, and a pool that a test kills would
lose all of its data. So each process writes its data four times a second and at its end: at exit, in `os._exit` and in
`os.execv`. A zygote and its ranks have no thread for this: those that a signal ends leave no data. Python environments
that tests build, and `python -S`, are not measured.
"""

# every measured process runs this file: only modules that coverage imports anyway are imported at the top
from __future__ import annotations

import _thread
import atexit
import contextlib
import marshal
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coverage import Coverage

# the directory to which processes write their data
VARIABLE = "PYTHON_COVERAGE_PARTS"
PACKAGE = "sgpu_magic"
MODULES_LISTED = 30
_NAME = "measured"
_ZYGOTE = f"{PACKAGE}.worker.process.zygote"
_EVERY_S = 0.25
# a thread that holds the lock has nearly finished writing
_LOCK_S = 2.0
_PART = ".part"
# tests that treat warnings as errors would fail on these
_WARNINGS = (
    "already-imported", "couldnt-parse", "module-not-imported", "module-not-measured", "no-ctracer",
    "no-data-collected", "no-sysmon", "trace-changed",
)  # fmt: skip


# ---------------------------------------------------------------- in every process


def measure(root: Path, parts: str) -> None:
    """Measure this process, and all that it forks, from now on."""
    from coverage import Coverage

    # the .pth files of a directory that is on the path twice are read twice
    if Coverage.current() is None:
        _Measured(root, parts)


class _Measured:
    """The measurement of this process.

    Args:
        root: The project's directory.
        parts: The directory to write to.
    """

    def __init__(self, root: Path, parts: str) -> None:
        self._parts = parts
        measured: Any = new_coverage(root)
        measured.start()
        # it would stop in a rank's exit functions, before the rank's last lines
        atexit.unregister(measured._atexit)
        # the tracers' data by file; `Coverage.save` loses what other threads add while it saves
        self._found: dict[str, set[Any]] = measured._collector.data
        self._has_thread = _ZYGOTE not in sys.orig_argv
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self._write)
        for name in ("_exit", "execv", "execve"):
            setattr(os, name, self._writing(getattr(os, name)))

    def _begin(self) -> None:
        self._file = os.path.join(self._parts, f"{os.getpid()}-{os.urandom(4).hex()}")
        self._written = 0
        self._lock = threading.RLock()
        if self._has_thread:
            # unknown to `threading`, so it is not waited for, traced or listed
            _thread.start_new_thread(self._write_often, ())

    def _write_often(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self._write()

    def _write(self) -> None:
        # the directory is removed after the tests, or the process can open no file
        with contextlib.suppress(OSError):
            if not self._lock.acquire(timeout=_LOCK_S):
                return
            try:
                found = self._found.copy()
                size = sum(map(len, found.values()))
                if size != self._written:
                    self._replace(marshal.dumps({name: arcs.copy() for name, arcs in found.items()}))
                    self._written = size
            finally:
                self._lock.release()

    def _replace(self, content: bytes) -> None:
        # a unique name, also if a signal handler exits while the main thread writes
        part = f"{self._file}-{os.urandom(4).hex()}{_PART}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(part, self._file)

    def _writing(self, leave: Any) -> Any:
        def write_and_leave(*arguments: Any) -> None:
            self._write()
            leave(*arguments)

        return write_and_leave


def new_coverage(root: Path, data_file: str | None = None) -> Coverage:
    """Return a `Coverage` with the settings that measuring and reporting share."""
    from coverage import Coverage

    made = Coverage(data_file=data_file, branch=True, source=[str(root / PACKAGE)], config_file=False)
    made.set_option("run:disable_warnings", list(_WARNINGS))
    return made


# ---------------------------------------------------------------- around the tests


def main(arguments: list[str]) -> int:
    """Run pytest with `arguments`, print the coverage, and return pytest's exit status."""
    import importlib.util
    import shutil

    if importlib.util.find_spec("coverage") is None:
        sys.exit("coverage is not installed in this environment")
    root = Path(__file__).resolve().parents[1]
    os.chdir(root)
    out = root / "build" / "coverage"
    parts = out / "parts"
    shutil.rmtree(out, ignore_errors=True)
    parts.mkdir(parents=True)
    # tests also run processes as other users
    parts.chmod(0o1777)
    with _in_every_process(root):
        status = _run_tests([argument for argument in arguments if argument != "--html"], parts)
    files = [str(path) for path in parts.iterdir() if path.suffix != _PART]
    report = new_coverage(root, str(out / ".coverage"))
    data = report.get_data()
    data.add_arcs(_put_together(files))
    data.touch_files([str(path) for path in (root / PACKAGE).rglob("*.py")])
    report.save()
    shutil.rmtree(parts)
    report.json_report(outfile=str(out / "coverage.json"))
    if "--html" in arguments:
        report.html_report(directory=str(out / "html"))
    _print(out, len(files))
    return status


@contextlib.contextmanager
def _in_every_process(root: Path) -> Iterator[None]:
    """Make every process of this environment that has `VARIABLE` set measure itself."""
    names = {"__name__": _NAME, "root": str(root)}
    code = f"exec(compile(open({__file__!r}).read(), {__file__!r}, 'exec'), {names!r})"
    pth = Path(sysconfig.get_path("purelib"), "sgpu_measure_coverage.pth")
    pth.write_text(f"import os; exec({code!r}) if {VARIABLE!r} in os.environ else None\n")
    try:
        yield
    finally:
        pth.unlink()


def _run_tests(arguments: list[str], parts: Path) -> int:
    import signal
    import subprocess

    # Ctrl-C ends pytest only: the coverage so far is still reported
    signal.signal(signal.SIGINT, lambda number, frame: None)
    command = [sys.executable, "-m", "pytest", "-m", "not slow", *arguments]
    status = subprocess.run(command, env={**os.environ, VARIABLE: str(parts)}).returncode
    return status if status >= 0 else 128 - status


def _put_together(files: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """Merge the files' data into arcs, pairs of line numbers, by module."""
    together: dict[str, set[Any]] = {}
    for path in files:
        for name, arcs in marshal.loads(Path(path).read_bytes()).items():
            together.setdefault(name, set()).update(arcs)
    return {name: [_arc(packed) for packed in arcs] for name, arcs in together.items()}


def _arc(packed: int | tuple[int, int]) -> tuple[int, int]:
    """Return an arc as a pair. The C tracer packs it into one number (`Collector.flush_data`); others do not."""
    if not isinstance(packed, int):
        return packed
    begin, end = packed & 0xFFFFFFF, (packed >> 28) & 0xFFFFFFF
    return (-begin if packed & 1 << 56 else begin), (-end if packed & 1 << 57 else end)


def _print(out: Path, processes: int) -> None:
    import json

    report = json.loads((out / "coverage.json").read_text())
    modules = {name: file["summary"] for name, file in report["files"].items()}
    listed = sorted(modules, key=lambda name: (-_missed(modules[name]), name))[:MODULES_LISTED]
    width = max(map(len, listed))
    print(f"\n{'most missed':{width}}  {'lines':>12}  {'branches':>12}")
    for name in listed:
        of = modules[name]
        lines = f"{of['missing_lines']} of {of['num_statements']}"
        branches = f"{of['missing_branches']} of {of['num_branches']}"
        print(f"{name:{width}}  {lines:>12}  {branches:>12}  {of['percent_covered']:5.1f} %")
    of = report["totals"]
    print(
        f"\n{of['percent_covered']:.2f} % of lines and branches: {of['num_statements']:,} statements, "
        f"{of['missing_lines']:,} missed; {of['num_branches']:,} branches, {of['num_partial_branches']:,} partial\n"
        f"{processes:,} processes; more in {out}"
    )


def _missed(summary: Any) -> int:
    return summary["missing_lines"] + summary["missing_branches"]


if __name__ == _NAME:
    measure(Path(globals()["root"]), os.environ[VARIABLE])
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
