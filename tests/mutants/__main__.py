"""`make mutants`: plants each fault of mutants.toml in a copy of the tree and runs its tests there.

    python -m tests.mutants                  faults that `make test` must catch
    python -m tests.mutants --all            also those that only `make test-all` has to catch
    python -m tests.mutants --only NAME ...  these faults
    python -m tests.mutants --list           show the faults, run nothing
    python -m tests.mutants --check-clean    run the named tests once without any fault

The exit status is 1 when a fault that should be caught is not, or when a test can't be run at all.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.mutants import patterns

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("mutants.toml")
PACKAGE = "sgpu_magic"

_LIMIT_S = 120.0
# for all named tests together, without any fault
_CLEAN_LIMIT_S = 3600.0
_NOT_SLOW = ("-m", "not slow")
# the caller's options for pytest and Python are not inherited
_NOT_INHERITED = ("PYTEST_", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH", "VIRTUAL_ENV")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py.*?)(?: - .*)?$", re.MULTILINE)
_KILL_PASSES = 5
# pytest's exit statuses
_PASSED, _TESTS_FAILED, _NOTHING_SELECTED = 0, 1, 5


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault.

    Args:
        name: Short and unique.
        promise: The promise of docs/understand/promises.md, or the sentence of another page, that it breaks.
        where: The dotted name of the module, class or function that it changes.
        tests: Test files or node ids that should fail.
        beside: A pattern (see `patterns`) that tells which function of `where` is meant; None if `where` says it.
        remove: The pattern of a statement, which is removed; None for a fault that replaces code.
        replace: The pattern of the code that is replaced; None for a fault that removes a statement.
        by: What replaces it.
        expected: "test" when `make test` must catch it, "test-all" when only `make test-all` has to.
    """

    name: str
    promise: str
    where: str
    tests: tuple[str, ...]
    beside: str | None = None
    remove: str | None = None
    replace: str | None = None
    by: str | None = None
    expected: str = "test"

    def plant(self, tree: Path) -> tuple[Path, str]:
        """Return the file that the fault changes, and the file's source with the fault.

        Args:
            tree: The folder that contains the package.

        Raises:
            ValueError: The code that the fault changes is not there, or is there more than once.
        """
        try:
            file, names = patterns.find_module(tree, self.where)
            source, scope = file.read_text(), patterns.Scope(names, self.beside)
            match self:
                case Fault(remove=str(statement)):
                    return file, patterns.remove(source, scope, statement)
                case Fault(replace=str(pattern), by=str(replacement)):
                    return file, patterns.replace(source, scope, pattern, replacement)
                case _:
                    raise ValueError("it has neither `remove`, nor `replace` and `by`")
        except ValueError as error:
            raise ValueError(f"{self.name} can't be planted in {self.where}: {error}") from error


class Verdict(enum.Enum):
    """What became of a fault."""

    CAUGHT = "caught"
    NOT_CAUGHT = "NOT CAUGHT"
    NO_TESTS = "NO TESTS SELECTED"
    BROKEN = "BROKEN"


class Outcome(NamedTuple):
    """One run of pytest.

    Args:
        by: The test that failed first, or why there was none.
        seconds: How long it took.
        output: What pytest printed.
    """

    verdict: Verdict
    by: str
    seconds: float
    output: str


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Read the faults, in the order of the file."""
    return msgspec.convert(tomllib.loads(path.read_text())["fault"], list[Fault])


class Tree:
    """A copy of the working tree in which faults are planted. Use it as a context manager.

    The copy has what git tracks and what it does not ignore. Every process of a test run has the copy's path in its
    environment, which is how leftovers are found.
    """

    def __init__(self) -> None:
        # short: the path of a socket below it ends at 108 bytes
        self.folder = Path(tempfile.mkdtemp(prefix="mut")).resolve()
        self.path = self.folder / "tree"
        self.temporary = self.folder / "t"

    def __enter__(self) -> Tree:
        try:
            self._copy()
            self._check_imports()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is left of the test runs and remove the copy."""
        _end_marked(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Generator[None]:
        """Have the fault in the copy for as long as the block runs."""
        file, planted = fault.plant(self.path)
        source = file.read_text()
        self._write(file, planted)
        try:
            yield
        finally:
            self._write(file, source)

    def run_tests(self, tests: Iterable[str], options: Sequence[str], limit_s: float) -> Outcome:
        """Run pytest on `tests` in the copy, for at most `limit_s` seconds."""
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--numprocesses", "0", *options, *tests]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                # pools, zygotes and ranks have sessions of their own
                _end_marked(str(self.folder))
            seconds = time.monotonic() - began
            output.seek(0)
            text = output.read()
        for left in self.temporary.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        return Outcome(*_verdict_of(code, text, limit_s), seconds, text)

    # ------------------------------------------------------------ within

    def _copy(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            source, target = ROOT / name, self.path / name
            # git still lists a file that was removed and not staged yet
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        # some tests briefly act as other users, who need to traverse this folder as they do /tmp
        self.folder.chmod(0o711)
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)

    def _check_imports(self) -> None:
        """Refuse to go on where Python imports another sgpu_magic, such as one that is installed in editable mode."""
        code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
        for options in ((), ("-P",), ("-s",)):
            reported = subprocess.run(
                [sys.executable, *options, "-c", code],
                cwd=self.folder,
                env=self._environ(),
                capture_output=True,
                text=True,
                check=True,
            )
            found = Path(reported.stdout.strip()).resolve()
            if not found.is_relative_to(self.path):
                raise SystemExit(f"mutants: the tests would import {found}, not the copy in {self.path}")

    def _environ(self) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        path = os.pathsep.join(filter(None, (str(self.path), environ.get("PYTHONPATH", ""))))
        return environ | {"PYTHONPATH": path, "TMPDIR": str(self.temporary)}

    @staticmethod
    def _write(file: Path, source: str) -> None:
        file.write_text(source)
        # cached bytecode is matched by size and second: a fault of the same length may be written within one second
        Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)


def _verdict_of(code: int | None, output: str, limit_s: float) -> tuple[Verdict, str]:
    """Return what an exit status of pytest means, and the first test that failed or the reason."""
    if code is None:
        return Verdict.CAUGHT, f"the time limit of {limit_s:g} s"
    if code == _PASSED:
        return Verdict.NOT_CAUGHT, ""
    if code == _TESTS_FAILED:
        found = _FAILED.search(output)
        return Verdict.CAUGHT, found[1] if found else "an error after the tests"
    if code == _NOTHING_SELECTED:
        return Verdict.NO_TESTS, "all of its tests are marked slow"
    return Verdict.BROKEN, f"pytest exited with status {code}"


def _end_marked(mark: str) -> None:
    """Kill every process of ours that has `mark` in its environment, command or working directory. Linux only."""
    for _ in range(_KILL_PASSES):
        found = [pid for pid in _own_processes() if _has_mark(pid, mark)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        # one of them may have started another process meanwhile
        time.sleep(0.1)


def _own_processes() -> Iterator[int]:
    """Yield the pids of this user's processes, without this one and zombies."""
    if not os.path.isdir("/proc/self"):
        return
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError, IndexError):
                base = Path("/proc", entry)
                state = (base / "stat").read_bytes().rpartition(b")")[2].split()[0]
                if base.stat().st_uid == os.getuid() and state not in (b"Z", b"X"):
                    yield int(entry)


def _has_mark(pid: int, mark: str) -> bool:
    base = Path("/proc", str(pid))
    for name in ("environ", "cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in (base / name).read_bytes():
                return True
    with contextlib.suppress(OSError):
        return os.readlink(base / "cwd").startswith(mark)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults, print a line for each and a summary; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Plant faults and see which tests catch them."
    )
    parser.add_argument("--all", action="store_true", help="run slow tests too, and faults that need them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these faults")
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    parser.add_argument("--check-clean", action="store_true", help="run the named tests without any fault")
    parser.add_argument("--show", action="store_true", help="print pytest's output too")
    options = parser.parse_args(arguments)

    faults = read_faults()
    if options.only:
        unknown = set(options.only) - {fault.name for fault in faults}
        if unknown:
            parser.error(f"unknown faults: {', '.join(sorted(unknown))}; --list shows all")
        faults = [fault for fault in faults if fault.name in options.only]
    if options.list:
        for fault in faults:
            print(f"{fault.name:26} {fault.expected:8} {fault.where}\n{'':26} {fault.promise}")
        return 0
    with Tree() as tree:
        if options.check_clean:
            return _check_clean(tree, faults, run_slow=options.all)
        return _run(tree, faults, run_slow=options.all, show=options.show)


def _run(tree: Tree, faults: Sequence[Fault], *, run_slow: bool, show: bool) -> int:
    """Plant each fault in turn."""
    due = [fault for fault in faults if run_slow or fault.expected == "test"]
    began = time.monotonic()
    caught: list[Fault] = []
    missed: list[Fault] = []
    for fault in due:
        with tree.planted(fault):
            outcome = tree.run_tests(fault.tests, ("-x", *(() if run_slow else _NOT_SLOW)), _LIMIT_S)
        (caught if outcome.verdict is Verdict.CAUGHT else missed).append(fault)
        by = f" by {outcome.by}" if outcome.verdict is Verdict.CAUGHT else f" {outcome.by}".rstrip()
        print(f"{fault.name:26} {outcome.seconds:5.1f} s  {outcome.verdict.value}{by}", flush=True)
        if show or outcome.verdict is Verdict.BROKEN:
            print(outcome.output, flush=True)
    print(f"\n{len(caught)} of {len(due)} faults caught in {time.monotonic() - began:.0f} s", end="")
    left = len(faults) - len(due)
    print(f"; {left} more with --all" if left else "")
    for fault in missed:
        print(f"not caught: {fault.name}, {fault.promise}")
    return 1 if missed else 0


def _check_clean(tree: Tree, faults: Sequence[Fault], *, run_slow: bool) -> int:
    """Run the tests of all faults once, without a fault: none may fail."""
    tests = dict.fromkeys(test for fault in faults if run_slow or fault.expected == "test" for test in fault.tests)
    outcome = tree.run_tests(tests, () if run_slow else _NOT_SLOW, _CLEAN_LIMIT_S)
    if outcome.verdict is Verdict.NOT_CAUGHT:
        print(f"all named tests pass without a fault, in {outcome.seconds:.0f} s")
        return 0
    print(outcome.output)
    print(f"tests fail without a fault, after {outcome.seconds:.0f} s")
    return 1


if __name__ == "__main__":
    sys.exit(main())
