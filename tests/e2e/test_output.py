"""What ranks print and show: whole, in order, marked, in the cell that made it."""

from __future__ import annotations

import re

import pytest
from kernels import Kernel


def test_every_way_to_write_is_seen(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "import ctypes, os, subprocess, sys\n"
        "print('python')\n"
        "sys.stderr.write('python stderr\\n')\n"
        "os.write(1, b'descriptor 1\\n')\n"
        "os.write(2, b'descriptor 2\\n')\n"
        "os.system('echo shell')\n"
        "subprocess.run(['sh', '-c', 'echo child; echo child stderr >&2'])\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.puts(b'from c'); libc.fflush(None)\n"
        "if os.fork() == 0:\n"
        "    print('forked'); sys.stdout.flush(); os._exit(0)\n"
        "os.wait()\n"
    )
    expected = {"python", "python stderr", "descriptor 1", "descriptor 2", "shell", "child", "child stderr"}
    assert set(reply.lines(0)) == expected | {"from c", "forked"}
    assert len(reply.lines(0)) == len(expected) + 2


def test_stdout_and_stderr_keep_their_order(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\n"
        "import sys, warnings\n"
        "for i in range(200):\n"
        "    print('out', i)\n"
        "    print('err', i, file=sys.stderr)\n"
    )
    expected = [f"{name} {i}" for i in range(200) for name in ("out", "err")]
    assert reply.lines(0) == expected
    assert reply.lines(1) == expected


def test_identical_lines_are_all_there(kernel: Kernel):
    reply = kernel.check("%%distributed -n 2\nfor _ in range(50): print('same')")
    assert reply.lines(0) == reply.lines(1) == ["same"] * 50


def test_tqdm_is_one_line_per_rank(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\n"
        "from tqdm import tqdm\n"
        "print('begin')\n"
        "for i in tqdm(range(300), desc=f'rank{rank}', mininterval=0): pass\n"
        "print('end')"
    )
    for rank in (0, 1):
        bars = [line for line in reply.lines(rank) if f"rank{rank}:" in line]
        assert len(bars) == 1, reply.text
        assert "300/300" in bars[0]
        assert reply.lines(rank)[0] == "begin"
        assert reply.lines(rank)[-1] == "end"


def test_unicode_split_between_writes_is_whole(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "import os, time\n"
        "for byte in 'grüße 🏖 末\\n'.encode():\n"
        "    os.write(1, bytes([byte]))\n"
        "    time.sleep(0.004)\n"
        "os.write(1, b'\\xff\\n')\n"
    )
    assert reply.lines(0) == ["grüße 🏖 末", "\ufffd"]


def test_print_without_newline_and_empty_lines(kernel: Kernel):
    reply = kernel.check("%%distributed -n 1\nprint('a', end='')\nprint('b')\nprint()\nprint('c', end='')")
    assert reply.lines(0) == ["ab", "", "c"]


def test_output_comes_while_the_cell_runs(kernel: Kernel):
    cell = kernel.start(
        "%%distributed -n 2\nimport os, time\nprint('started')\nwhile not os.path.exists('go'): time.sleep(0.01)"
    )
    cell.until_shown("[1] started")
    cell.until_shown("[0] started")
    (kernel.home.work / "go").touch()
    assert cell.wait().status == "ok"
    (kernel.home.work / "go").unlink()


def test_late_lines_do_not_land_in_the_next_cell(kernel: Kernel):
    first = kernel.start(
        "%%distributed -n 2 --ui none\n"
        "import atexit, os, subprocess\n"
        "atexit.register(lambda: os.write(1, b'late from the rank\\n'))\n"
        "subprocess.Popen(['sh', '-c', 'while :; do echo late from a child; sleep 0.02; done'])\n"
    )
    assert first.wait().status == "ok"
    for _ in range(3):
        later = kernel.check("%%distributed -n 2\nprint('mine')")
        assert later.lines(0) == later.lines(1) == ["mine"]
        assert "late" not in later.text
    assert "late" not in kernel.check("import time; time.sleep(0.1)").text


def test_a_flood_is_whole_and_in_order_in_the_logs_and_counted(kernel: Kernel):
    kernel.check(
        "result = get_ipython().run_cell_magic('distributed', '-n 4',"
        " 'for i in range(20_000): print(f\"line {i} of {rank}\")')"
    )
    assert kernel.value("result.lines") == [20_000] * 4
    for rank in range(4):
        log = (kernel.home.run_dir(kernel.home.runs[-1]) / f"rank-{rank}.log").read_text()
        assert log.splitlines() == [f"line {i} of {rank}" for i in range(20_000)]


def test_a_flood_shows_its_end_and_says_what_was_left_out(kernel: Kernel):
    reply = kernel.check("%%distributed -n 2\nfor i in range(40_000): print(f'line {i} of {rank}')")
    assert re.search(r"line 39999 of [01]\nsucceeded", reply.text)
    assert len(reply.text) + len(reply.html) <= 100_000
    shown = len(reply.lines(0)) + len(reply.lines(1))
    assert f"{80_000 - shown:,} lines" in reply.html
    run = kernel.home.runs[-1]
    left_out = (
        f"... 79,920 lines of 2 ranks in the run's log: sgpu logs {run[:4]} · {kernel.home.run_dir(run)}/rank-*.log"
    )
    assert left_out in reply.text


def test_one_very_long_line(kernel: Kernel):
    kernel.check("%%distributed -n 1\nprint('x' * 3_000_000)\nprint('after')")
    log = (kernel.home.run_dir(kernel.home.runs[-1]) / "rank-0.log").read_text()
    assert log == "x" * 3_000_000 + "\nafter\n"


def test_colours_and_markup_are_text(kernel: Kernel):
    reply = kernel.check("%%distributed -n 1\nprint('\\x1b[31mred\\x1b[0m <script>alert(1)</script>')")
    assert reply.lines(0) == ["red <script>alert(1)</script>"]
    assert "<script>" not in reply.html


# ---------------------------------------------------------------- rich displays


def test_displays_stand_in_their_place(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "from IPython.display import HTML, display\n"
        "print('before')\n"
        "display(HTML('<b>bold</b>'))\n"
        "print('after')\n"
    )
    kinds = [
        "html" if output.data.get("text/html") == "<b>bold</b>" else "text"
        for output in reply.outputs
        if output.kind == "display" and output.text
    ]
    at = reply.text.index
    assert "html" in kinds
    assert at("[0] before") < at("<IPython.core.display.HTML object>") < at("[0] after") < at("succeeded")


def test_many_displays_stay_between_their_lines(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "import os\n"
        "from IPython.display import Markdown, display\n"
        "for i in range(60):\n"
        "    os.write(1, b'before %d\\n' % i)\n"
        "    display(Markdown(f'shown {i}'))\n"
        "    os.write(1, b'after %d\\n' % i)\n"
    )
    found = []
    for output in reply.outputs:
        found += [output.data["text/markdown"]] if "text/markdown" in output.data else []
        found += re.findall(r"^\[0\] ((?:before|after) \d+)", output.text, re.MULTILINE)
    assert found == [f"{what} {i}" for i in range(60) for what in ("before", "shown", "after")]


def test_displays_of_several_ranks_tell_whose_they_are(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\nfrom IPython.display import Markdown, display\ndisplay(Markdown(f'of *{rank}*'))"
    )
    shown = [data["text/markdown"] for data in reply.displays if "text/markdown" in data]
    assert shown == ["of *0*", "of *1*"]
    assert [line for line in reply.text.splitlines() if line in ("[0]", "[1]")] == ["[0]", "[1]"]


def test_figure_comes_as_an_image(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\nimport matplotlib.pyplot as plt\nif rank == 0:\n    plt.plot([1, 2, 3])\n    plt.show()",
        90,
    )
    images = [data["image/png"] for data in reply.displays if "image/png" in data]
    assert len(images) == 1
    assert images[0].startswith("iVBOR")


def test_last_expression_dataframe_is_displayed_rich(kernel: Kernel):
    reply = kernel.check("%%distributed -n 1\nimport pandas as pd\npd.DataFrame({'loss': [0.5, 0.25]})")
    tables = [data for data in reply.displays if "<table" in data.get("text/html", "") and "loss" in data["text/html"]]
    assert len(tables) == 1, reply.html
    quiet = kernel.check("%%distributed -n 1 --name quiet\nimport pandas as pd\npd.DataFrame({'loss': [0.5, 0.25]});")
    assert "loss" not in quiet.html


def test_dataframes_of_the_ranks_are_put_together(kernel: Kernel):
    kernel.check("%%distributed -n 3\nimport pandas as pd\npd.DataFrame({'step': range(2), 'loss': rank + 0.5})")
    kernel.check("result = _")
    assert kernel.value("[result.frame().index.names, result.frame().index.tolist()]") == [
        ["rank", None],
        [[rank, row] for rank in range(3) for row in range(2)],
    ]
    assert kernel.value("result.frame().loc[2, 'loss'].tolist()") == [2.5, 2.5]
    assert kernel.value("result.frame(ignore_index=True).index.tolist()") == [*range(6)]
    kernel.check("%%distributed -n 2\nimport pandas as pd\npd.Series([1, 2]) if rank == 0 else None")
    reply = kernel.run("_.frame()")
    assert reply.ename == "UsageError"
    assert "rank 1 of run" in reply.evalue
    assert "returned no value" in reply.evalue
    kernel.check("del result")


def test_display_handle_updates_in_place(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "from IPython.display import HTML, display\n"
        "handle = display(HTML('<i>first</i>'), display_id=True)\n"
        "handle.update(HTML('<i>second</i>'))"
    )
    shown = [data["text/html"] for data in reply.displays if "<i>" in data.get("text/html", "")]
    assert shown == ["<i>second</i>"]


def test_clear_output_clears_the_ranks_output(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\n"
        "from IPython.display import clear_output\n"
        "for i in range(5):\n"
        "    clear_output(wait=True)\n"
        "    print('step', i)"
    )
    assert reply.lines(0) == ["step 4"]


def test_warnings_look_as_in_the_notebook(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 1\nimport warnings\nwarnings.warn('old', DeprecationWarning)\nwarnings.warn('careful')"
    )
    assert "DeprecationWarning: old" in reply.text
    assert "UserWarning: careful" in reply.text


def test_message_rate_is_bounded_during_a_flood(kernel: Kernel):
    reply = kernel.check(
        "%%distributed -n 2\n"
        "import time\n"
        "end = time.monotonic() + 1.5\n"
        "while time.monotonic() < end: print('x' * 100); time.sleep(0.0005)"
    )
    updates = [kind for kind in reply.messages if "display" in kind]
    assert len(updates) <= 10 * reply.seconds + 5


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_the_last_line_of_a_rank_that_dies_right_after_it(kernel: Kernel, end: str):
    reply = kernel.run(f"%%distributed -n 2\nimport os, time\ntime.sleep(0.05)\nprint('last words of', rank)\n{end}")
    assert reply.ename == "WorkerDied", reply.story
    assert reply.lines(0) == ["last words of 0"]
    assert reply.lines(1) == ["last words of 1"]


def test_an_explicit_flush_is_done_whatever_was_just_written(kernel: Kernel):
    reply = kernel.run(
        "%%distributed -n 1\nimport os\nfor i in range(50): print(i)\nprint('half', end='', flush=True)\nos._exit(0)"
    )
    assert reply.lines(0) == [*map(str, range(50)), "half"]
