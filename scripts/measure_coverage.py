# ruff: noqa: T201
"""Run the tests and say which lines and branches of the package they reach, in whatever process.

    python scripts/measure_coverage.py [--html] [ARGUMENT OF PYTEST]...

The exit status is pytest's. `build/coverage` gets `coverage.json` and what `coverage report` reads, with `--html` also
pages to read. Tests are slower under measurement; what one reaches before a deadline ends it counts all the same.

While the tests run, a .pth file lets every process of this environment that has `VARIABLE` in its own run this file and
measure itself and all that it forks. coverage's ways to do so are not enough here: its variables do not get to zygotes,
which start with few others than those that begin with `PYTHON`; of a pool that a test kills, and of all that it has
done for other tests, nothing would be left. So each process writes down what it has found so far, four times a second
and at its end: at exit, in `os._exit` and in `os.execv`. A zygote may have no thread for it, and its ranks have none
either: those that a signal ends leave nothing. Nothing is known of the Pythons that tests build, and of `python -S`.
"""

# every process that is measured reads this: above are only modules that coverage imports anyhow
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

# the directory in which processes write down what they have found
VARIABLE = "PYTHON_COVERAGE_PARTS"
PACKAGE = "sgpu_magic"
MODULES_LISTED = 30
_NAME = "measured"
_ZYGOTE = f"{PACKAGE}.worker.process.zygote"
_EVERY_S = 0.25
# one that is writing is about to be done
_LOCK_S = 2.0
_PART = ".part"
# a warning would be an error where warnings are
_WARNINGS = (
    "already-imported", "couldnt-parse", "module-not-imported", "module-not-measured", "no-ctracer",
    "no-data-collected", "no-sysmon", "trace-changed",
)  # fmt: skip


# ---------------------------------------------------------------- in every process


def measure(root: Path, parts: str) -> None:
    """Measure this process from now on, and all that it forks."""
    from coverage import Coverage

    # a directory that is on the path twice has its .pth files read twice
    if Coverage.current() is None:
        _Measured(root, parts)


class _Measured:
    """This process.

    Args:
        root: The project's directory.
        parts: Where to write.
    """

    def __init__(self, root: Path, parts: str) -> None:
        self._parts = parts
        measured: Any = new_coverage(root)
        measured.start()
        # it would end in a rank that runs what was registered for its exit, and still has to leave
        atexit.unregister(measured._atexit)
        # by file, what tracers add to; `Coverage.save` forgets what other threads find while it saves
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
            # the interpreter knows nothing of it, so nobody waits for it, traces it or lists it
            _thread.start_new_thread(self._write_often, ())

    def _write_often(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self._write()

    def _write(self) -> None:
        # its directory is gone when the tests are over, or the process can open no file
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
        # its own even where a signal's handler leaves while the main thread writes
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
    """What measures and what reports have the same settings."""
    from coverage import Coverage

    made = Coverage(data_file=data_file, branch=True, source=[str(root / PACKAGE)], config_file=False)
    made.set_option("run:disable_warnings", list(_WARNINGS))
    return made


# ---------------------------------------------------------------- around the tests


def main(arguments: list[str]) -> int:
    """Run pytest with `arguments`, say what was reached, and return pytest's exit status."""
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
    # tests run processes as other users
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
    """Let every process of this environment that has `VARIABLE` measure itself."""
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

    # Ctrl-C ends pytest; what it has reached so far is reported
    signal.signal(signal.SIGINT, lambda number, frame: None)
    command = [sys.executable, "-m", "pytest", "-m", "not slow", *arguments]
    status = subprocess.run(command, env={**os.environ, VARIABLE: str(parts)}).returncode
    return status if status >= 0 else 128 - status


def _put_together(files: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """From line to line, by module."""
    together: dict[str, set[Any]] = {}
    for path in files:
        for name, arcs in marshal.loads(Path(path).read_bytes()).items():
            together.setdefault(name, set()).update(arcs)
    return {name: [_arc(packed) for packed in arcs] for name, arcs in together.items()}


def _arc(packed: int | tuple[int, int]) -> tuple[int, int]:
    """The tracer in C packs the two into one number (`Collector.flush_data`); others do not."""
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
