"""Without a front end: nbclient, papermill, and IPython in a terminal behave as the notebook does."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path

import pytest
from headless_notebooks import notebook
from kernels import Home, plain
from lazy_modules import nbclient, nbformat, papermill
from time_limits import GRACE_S


def text_of(cell: nbformat.NotebookNode) -> str:
    """All text below a cell."""
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts.append(output.get("text", "") or data.get("text/plain", "") or "\n".join(output.get("traceback", [])))
    return plain("\n".join(parts))


def execute(home: Home, made: nbformat.NotebookNode, **options) -> nbformat.NotebookNode:
    client = nbclient.NotebookClient(made, timeout=60, resources={"metadata": {"path": str(home.work)}}, **options)
    return client.execute()


# ---------------------------------------------------------------- nbclient and papermill


def test_nbclient_saves_what_a_reader_needs(environment: Home):
    made = execute(
        environment,
        notebook(
            "%load_ext sgpu_magic",
            "%%distributed -n 2 --out total\n"
            "import torch, torch.distributed as dist\n"
            "total = torch.ones(1); dist.all_reduce(total); total = total.item()\n"
            "print('from', rank)\n"
            "from IPython.display import HTML, display\n"
            "if rank == 0: display(HTML('<b>bold</b>'))",
            "print(total)",
        ),
    )
    text = text_of(made.cells[1])
    for part in ("2 ranks on local", "[0] from 0", "[1] from 1", "succeeded in"):
        assert part in text, text
    bundles = [output.data for output in made.cells[1].outputs if "data" in output]
    assert any("<b>bold</b>" in bundle.get("text/html", "") for bundle in bundles)
    assert any("application/vnd.sgpu.run.v1+json" in bundle for bundle in bundles)
    assert text_of(made.cells[2]).strip() == "2.0"
    # the saved file is a valid notebook
    nbformat.validate(made)


def test_nbclient_fails_at_a_failed_rank(environment: Home):
    made = notebook(
        "%load_ext sgpu_magic", "%%distributed -n 2\nif rank == 1: raise ValueError('bad batch')", "after = 1"
    )
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="bad batch"):
        execute(environment, made)
    assert "rank 1 of 2" in text_of(made.cells[1])
    assert made.cells[2].execution_count is None


@pytest.mark.slow
def test_papermill_passes_parameters_and_fails_alike(environment: Home, tmp_path: Path):
    made = notebook(
        "n = 1", "%load_ext sgpu_magic", "%%distributed -n 2\nprint('n is', n)\nif n == 7: raise KeyError(n)"
    )
    made.cells[0].metadata["tags"] = ["parameters"]
    source = tmp_path / "in.ipynb"
    nbformat.write(made, source)
    options = {"cwd": str(environment.work), "kernel_name": "sgpu-test", "progress_bar": False}
    done = papermill.execute_notebook(str(source), str(tmp_path / "out.ipynb"), {"n": 5}, **options)
    assert "[1] n is 5" in text_of(done.cells[-1])
    with pytest.raises(papermill.PapermillExecutionError, match="7"):
        papermill.execute_notebook(str(source), str(tmp_path / "bad.ipynb"), {"n": 7}, **options)


# ---------------------------------------------------------------- IPython in a terminal


IPYTHON = ["IPython", "--no-banner", "--no-confirm-exit", "--colors=NoColor", "--simple-prompt"]
CONSOLE = ["jupyter_console", "--no-confirm-exit", "--simple-prompt"]
_UNTIL_HEARD = "[(print('heard', flush=True), time.sleep(0.02)) for _ in iter(lambda: os.path.exists('heard'), True)]"
_LOADING = "run_line_magic('load_ext', 'sgpu_magic')"


class Terminal:
    """IPython or Jupyter Console behind a pseudo-terminal, as a person has it."""

    def __init__(self, home: Home, command: list[str]) -> None:
        self.text = ""
        pid, self._fd = pty.fork()
        if pid == 0:
            os.chdir(home.work)
            os.execve(sys.executable, [sys.executable, "-m", *command], home.environ | {"TERM": "xterm"})
        self.pid = pid
        home.kernel_pids.add(pid)
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def run(self, text: str, until: str, timeout_s: float = 60.0) -> str:
        """Type lines and return what came until the pattern `until` was seen."""
        self.text = ""
        self.send(text)
        return self.wait_for(lambda: re.search(until, self.text), timeout_s, until)

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> str:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{what!r} does not come; there is:\n{self.text}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self.text += plain(os.read(self._fd, 65536).decode(errors="replace")).replace("\r\n", "\n")
        return self.text

    def close(self) -> None:
        self.send("exit()\n")
        end = time.monotonic() + 10
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            with contextlib.suppress(OSError):
                if select.select([self._fd], [], [], 0.05)[0]:
                    os.read(self._fd, 65536)
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)


@contextlib.contextmanager
def opened(home: Home, command: list[str]) -> Iterator[Terminal]:
    made = Terminal(home, command)
    try:
        made.run("", r"In ?\[1\]: ")
        if command is CONSOLE:
            # it hangs if the first cell ends before it receives the kernel's messages
            (home.work / "heard").unlink(missing_ok=True)
            made.run(f"import os, time; {_UNTIL_HEARD}; get_ipython().{_LOADING}\n", r"(?m)^heard$")
            (home.work / "heard").touch()
            made.wait_for(lambda: re.search(r"In ?\[2\]: ", made.text), 60, "the prompt")
        else:
            made.run("%load_ext sgpu_magic\n", r"In ?\[2\]: ")
        yield made
    finally:
        made.close()
    home.kernel_pids.discard(made.pid)
    home.check_leaks()


@pytest.fixture
def terminal(home: Home) -> Iterator[Terminal]:
    with opened(home, IPYTHON) as made:
        yield made


def cell(body: str, options: str = "-n 2") -> str:
    return f"get_ipython().run_cell_magic('distributed', {options!r}, {body!r})\n"


def test_terminal_shows_lines_summary_value_and_error(terminal: Terminal):
    text = terminal.run(cell("print('hello', rank)\nrank * 2"), r"In \[3\]: ")
    for part in ("2 ranks on local (cpu, gloo)", "[0] hello 0", "[1] hello 1", "succeeded in", "[0, 2]"):
        assert part in text, text
    text = terminal.run(cell("if rank == 1: raise ValueError('bad batch')"), r"In \[4\]: ")
    for part in ("rank 1 of 2", "ValueError: bad batch"):
        assert part in text, text
    assert "sgpu_magic/" not in text
    text = terminal.run("%sgpu_status\n", r"In \[5\]: ")
    assert " CPU rank" in text
    assert "failed" in text


@pytest.mark.slow
def test_jupyter_console_shows_every_line_and_the_end(home: Home):
    with opened(home, CONSOLE) as console:
        # longer than the delay before a notebook opens its live view
        (home.work / "go").unlink(missing_ok=True)
        waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
        body = f"for i in range(300): print('step', i)\n{waits}print('end', rank)\nrank * 2"
        console.run(cell(body), r"\[1\] step 299\n")
        (home.work / "go").touch()
        text = console.wait_for(lambda: re.search(r"In ?\[3\]: ", console.text), 60, "the prompt")
        for part in ("2 ranks on local", "[0] step 0\n", "[1] step 150\n", "[0] end 0", "[1] end 1", "succeeded in"):
            assert part in text, text
        assert "when this was saved" not in text
        assert "[0, 2]" in text
        text = console.run(
            cell("import time\ntime.sleep(0.3)\nif rank == 1: raise ValueError('bad batch')"), r"In ?\[4\]: "
        )
        for part in ("rank 1 of 2", "ValueError: bad batch", "failed"):
            assert part in text, text


def test_terminal_control_c_frees_the_prompt(terminal: Terminal):
    terminal.run(
        cell("import time\nfor i in range(30): print('step', i, flush=True); time.sleep(0.01)\nwhile True: pass"),
        r"\[0\] step 29",
    )
    pressed = time.monotonic()
    terminal.send("\x03")
    text = terminal.wait_for(lambda: re.search(r"In \[3\]: ", terminal.text), 10, "the prompt")
    assert time.monotonic() - pressed < GRACE_S
    assert "interrupted" in text or "cancelled" in text
    # each line was printed once, as it came
    assert text.count("2 ranks on local") == 1
    assert text.count("[0] step 3\n") == 1
    assert "[1] next 1" in terminal.run(cell("print('next', rank)"), r"In \[4\]: ")


def test_terminal_tqdm_is_one_line_per_rank(terminal: Terminal):
    text = terminal.run(
        cell("from tqdm import tqdm\nfor i in tqdm(range(200), desc=f'r{rank}', mininterval=0): pass\nprint('end')"),
        r"In \[3\]: ",
    )
    final = [line.rsplit("\r", 1)[-1] for line in text.splitlines()]
    for rank in (0, 1):
        assert len([line for line in final if f"[{rank}] r{rank}: 100%" in line]) == 1, text
