"""`%sgpu_env`, `--env-version` and the other options about packages, tracking and cost, in a real kernel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels import Home, Kernel, eventually, plain

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# a limit of cost needs a price
HOME_VARIABLES = {"SGPU_PRICES": "cpu=1.20"}

# a package with only metadata and one module, in a site directory of its own
_SITE = """
import importlib, pathlib, shutil, sys
site = pathlib.Path({folder!r}) / "site-packages"
def install(version):
    for old in site.glob("paperclip-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"paperclip-{{version}}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: paperclip\\nVersion: {{version}}\\n\\n")
    (info / "RECORD").write_text(f"paperclip.py,sha256={{version}},1\\n")
    (site / "paperclip.py").write_text(f"__version__ = {{version!r}}\\n")
install("1.0")
if str(site) not in sys.path:
    sys.path.append(str(site))
import paperclip
"""


@pytest.fixture
def site(kernel: Kernel, tmp_path: Path) -> Iterator[Kernel]:
    """The kernel with the package `paperclip` 1.0 loaded; `install(version)` installs another."""
    kernel.check(_SITE.format(folder=str(tmp_path)))
    yield kernel
    kernel.check("sys.path.remove(str(site)); del sys.modules['paperclip']")


def spec_of(home: Home, run_id: str) -> dict[str, Any]:
    """What was submitted, as the run's directory has it; that is written beside the run."""
    file = home.run_dir(run_id) / "run.json"
    record = json.loads(eventually(lambda: file.is_file() and file.read_text(), 10, f"{file} is there"))
    return record.get("spec", record)


# ---------------------------------------------------------------- %sgpu_env


def test_it_shows_python_packages_and_torch(kernel: Kernel):
    reply = kernel.check("%sgpu_env")
    (shown,) = reply.displays
    text, html = shown["text/plain"], plain(shown["text/html"])
    for words in (f"Python {'.'.join(map(str, sys.version_info[:3]))}", "packages", "torch 2", "editable"):
        assert words in text
        assert words in html
    assert "difference" not in text


def test_it_shows_the_difference_to_a_base(kernel: Kernel):
    (shown,) = kernel.check("%sgpu_env --diff 4").displays
    text = shown["text/plain"]
    assert re.search(r"\d+ differences from 4", text)
    assert re.search(rf"^Python +{re.escape(HERE)} +3\.12$", text, re.MULTILINE) or HERE == "3.12"
    assert re.search(r"^dbus-python +- +1\.3\.2 +the operating system's$", text, re.MULTILINE)
    assert re.search(r"^databricks-serverless-gpu +- +0\.5\.3 +in no index$", text, re.MULTILINE)
    assert re.search(r"^torch +2\.\S+ +2\.7\.1$", text, re.MULTILINE)
    assert "<table" in shown["text/html"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%sgpu_env --diff nothing", "There are: 4, ai-4"),
        ("%sgpu_env save", "needs a name"),
        ("%sgpu_env save 4", "Choose another name"),
        ("%sgpu_env save ../up", "is not a valid environment name"),
        ("%sgpu_env show", "has no action 'show'"),
    ],
)
def test_what_means_nothing_is_told(kernel: Kernel, line: str, words: str):
    reply = kernel.run(line)
    assert reply.ename == "UsageError"
    assert words in reply.evalue


def test_help_shows_the_options(kernel: Kernel):
    assert "--diff" in kernel.check("%sgpu_env -h").text


def test_a_package_that_was_changed_after_its_import_asks_for_a_restart(site: Kernel):
    assert "paperclip" not in site.check("%sgpu_env").displays[0]["text/plain"]
    site.check("install('2.0')")
    (shown,) = site.check("%sgpu_env").displays
    assert "restart the kernel to use paperclip 2.0, 1.0 is loaded" in shown["text/plain"]
    assert "restart the kernel to use paperclip 2.0, 1.0 is loaded" in plain(shown["text/html"])


def test_a_session_is_told_apart_from_what_was_installed_since(site: Kernel):
    site.check("%sgpu_env")
    site.check("%sgpu_connect --gpus 1 --type cpu --name work")
    try:
        assert "session work" not in site.check("%sgpu_env").displays[0]["text/plain"]
        site.check("install('3.0')")
        text = site.check("%sgpu_env").displays[0]["text/plain"]
        assert "since session work was connected: paperclip 1.0 -> 3.0" in text
    finally:
        site.check("%sgpu_disconnect work")


def test_a_saved_environment_is_offered_and_compared(new_kernel: Any, home: Home):
    # only its sources are built into a wheel, which takes a second
    kernel = new_kernel()
    reply = kernel.check("%sgpu_env save mine", timeout_s=100)
    assert "saved" in reply.text
    assert "--env-version mine" in reply.text
    assert "mine" in kernel.complete("%%distributed --env-version m")
    assert kernel.complete("%sgpu_env --diff ai") == ["ai-4"]
    assert kernel.complete("%%distributed --torch ") == ["node", "mine"]
    assert "save" in kernel.complete("%sgpu_env ")
    (shown,) = kernel.check("%sgpu_env --diff mine").displays
    assert "saved: mine" in shown["text/plain"]
    assert "from mine" in shown["text/plain"]


# ---------------------------------------------------------------- options


def test_a_base_for_another_python_is_refused_before_anything_starts(kernel: Kernel, home: Home):
    if HERE == "3.12":
        pytest.skip("this Python is the base's own")
    before = set(home.runs)
    for cell in (
        "%%distributed -n 1 --type cpu --env-version 4\npass",
        "import sgpu_magic\nsgpu_magic.distributed(gpus=1, gpu_type='cpu', env_version=4)(print).distributed()",
        "%sgpu_connect --gpus 1 --type cpu --env-version ai-4",
        "sgpu_magic.map(str, [1], gpu_type='cpu', env_version='4')",
    ):
        reply = kernel.run(cell)
        assert reply.ename == "EnvironmentFailed", reply.story
        for words in ("Python 3.12", f"Python {HERE}", "kernel of Python 3.12"):
            assert words in reply.evalue
    assert set(home.runs) == before


def test_options_that_change_nothing_are_named_once_in_the_run(kernel: Kernel):
    nothing = "no effect on this run: its ranks use the notebook's own Python, and nothing is installed for them"
    for options, words in (
        ("--torch mine --allow-build", f"--torch mine and --allow-build have {nothing}"),
        ("--torch mine", f"--torch mine has {nothing}"),
        ("--allow-build", f"--allow-build has {nothing}"),
    ):
        reply = kernel.check(f"%%distributed -n 1 --type cpu --ui text {options}\npass")
        assert reply.text.count(f"note: {words}\n") == 1, reply.story
        assert reply.text.count(nothing) == 1
    assert nothing not in kernel.check("%%distributed -n 1 --type cpu --ui text --torch node\npass").text


@pytest.mark.slow
def test_a_default_that_the_running_notebook_sets_counts_from_the_next_run(kernel: Kernel, home: Home):
    (home.work / "broken.txt").write_text("numpy==2.1.3\npandas==1.5.3\n")
    kernel.check("%%distributed -n 1 --type cpu\npass")
    kernel.check("%env SGPU_ENV_VERSION=broken.txt")
    before = set(home.runs)
    for cell in ("%%distributed -n 1 --type cpu\npass", "%sgpu_connect --gpus 1 --type cpu"):
        reply = kernel.run(cell)
        assert reply.ename == "EnvironmentFailed", reply.story
        assert "the packages of broken.txt would break on the ranks" in reply.evalue
    assert set(home.runs) == before
    kernel.check("%%distributed -n 1 --type cpu --env-version none\npass")
    kernel.check("del __import__('os').environ['SGPU_ENV_VERSION']")
    kernel.check("%%distributed -n 1 --type cpu\npass")


@pytest.mark.slow
def test_a_run_has_the_packages_of_a_file_and_the_nodes_torch(kernel: Kernel, home: Home):
    (home.work / "small.txt").write_text("zipp==3.20.0\nidna\n")
    kernel.check(
        "%%distributed -n 1 --type cpu --env-version small.txt --out found\n"
        "import importlib.metadata, importlib.util, torch, zipp\n"
        "found = importlib.metadata.version('zipp'), torch.__version__, importlib.util.find_spec('pandas') is None",
        timeout_s=110,
    )
    version, torch, has_no_pandas = kernel.value("found")
    assert version == "3.20.0"
    assert torch == kernel.value("__import__('torch').__version__")
    assert has_no_pandas
    spec = spec_of(home, kernel.value("_.run_id"))
    assert spec["environment_label"] == "small.txt"
    listed = sgpu(home, "env", "list")
    assert spec["environment"][:12] in listed.stdout
    assert "2 packages" in listed.stdout


def test_packages_that_would_break_are_refused_before_anything_starts(kernel: Kernel, home: Home):
    (home.work / "broken.txt").write_text("numpy==2.1.3\npandas==1.5.3\n")
    before = set(home.runs)
    reply = kernel.run("%%distributed -n 1 --type cpu --env-version broken.txt\npass")
    assert reply.ename == "EnvironmentFailed", reply.story
    assert "the packages of broken.txt would break on the ranks, so nothing was started: pandas 1.5.3" in reply.evalue
    assert set(home.runs) == before


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%distributed --max-cost 0\npass", "amount above 0"),
        ("%%distributed --max-cost much\npass", "amount above 0"),
        ("%%distributed --torch theirs\npass", "The values are node, mine."),
        ("%%distributed --env-version nowhere.txt\npass", "there is no such file"),
        ("%sgpu_connect --profile", "put it on the %%distributed line"),
        ("import sgpu_magic\nsgpu_magic.distributed(torch='theirs')", "torch='theirs' is not possible"),
        ("import sgpu_magic\nsgpu_magic.distributed(max_cost=-1)", "amount above 0"),
        ("import sgpu_magic\nsgpu_magic.distributed(max_cost=True)", "amount above 0"),
        ("import sgpu_magic\nsgpu_magic.connect(max_cost=0)", "amount above 0"),
    ],
)
def test_an_option_that_means_nothing_is_refused(kernel: Kernel, cell: str, words: str):
    reply = kernel.run(cell)
    assert reply.ename == "UsageError", reply.story
    assert words in reply.evalue


@pytest.fixture
def session(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel that is connected to one rank."""
    kernel.check("%sgpu_connect --gpus 1 --type cpu --env TASTE=sweet --max-cost 7")
    kernel.check("%%distributed\npass")
    yield kernel
    kernel.check("%sgpu_disconnect")


def test_what_is_the_sessions_is_refused_for_one_cell(session: Kernel):
    for option in ("--env-version none", "--torch mine", "--allow-build", "--max-cost 5"):
        for magic in ("%%distributed", "%%distributed --fresh", "%%rank 0"):
            reply = session.run(f"{magic} {option}\npass")
            assert reply.ename == "UsageError", reply.story
            for words in ("session main", "when you connect the session", "--session none"):
                assert words in reply.evalue


def test_calls_in_a_session_have_its_packages(session: Kernel):
    session.check("import sgpu_magic, sgpu_magic.runs.sessions.registry as registry\nhere = registry.current()")
    reply = session.run("sgpu_magic.distributed(session=here, env_version='4')(len).distributed([1])")
    assert reply.ename == "UsageError", reply.story
    assert "session main" in reply.evalue
    assert session.check("sgpu_magic.distributed(session=here, track=False)(len).distributed([1])").result == "[1]"


def test_scalars_of_a_cell_are_its_parameters(session: Kernel, home: Home):
    session.check("import sgpu_magic.runs.sessions.registry as registry\nmain = registry.current().run_id")
    assert spec_of(home, session.value("main"))["max_cost"] == 7.0
    session.check(
        "lr, epochs, name, api_key, rows = 0.1, 3, 'small', 'sk-' + 'a' * 30, [1]\nflag, long = True, 'x' * 251"
    )
    session.check("%%distributed --profile\n(lr, epochs, name, api_key, rows, flag, long)")
    spec = spec_of(home, session.value("_.run_id"))
    wanted = [["lr", "0.1"], ["epochs", "3"], ["name", "small"], ["flag", "True"]]
    assert sorted(spec["parameters"]) == sorted(wanted)
    assert spec["profile"] is True
    # what a cell sets on the ranks stays there; the notebook's value is not used
    session.check("%%distributed\nlr = 0.5")
    session.check("%%distributed\nlr, epochs")
    assert spec_of(home, session.value("_.run_id"))["parameters"] == [["epochs", "3"]]


@pytest.mark.slow
def test_arguments_of_a_call_are_its_parameters(kernel: Kernel, home: Home):
    kernel.check("def train(lr, *rest, epochs=1, rank, data=None, **more): return lr\nimport sgpu_magic")
    kernel.check(
        "run = sgpu_magic.distributed(gpus=1, gpu_type='cpu', max_cost=3)(train).distributed.submit("
        "0.1, 7, epochs=2, data=[1], token='hf_' + 'a' * 34, kind='small')\nrun.result()"
    )
    spec = spec_of(home, kernel.value("run.run_id"))
    wanted = [["lr", "0.1"], ["rest[0]", "7"], ["epochs", "2"], ["kind", "small"]]
    assert sorted(spec["parameters"]) == sorted(wanted)
    assert spec["max_cost"] == 3.0
    kernel.check("sweep = sgpu_magic.map(abs, [-4], gpu_type='cpu', profile=True)")
    spec = spec_of(home, kernel.value("sweep.runs[0].run_id"))
    assert [value for _, value in spec["parameters"]] == ["-4"]
    assert spec["profile"] is True


def sgpu(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgpu_magic.cli", *arguments]
    return subprocess.run(command, env=home.environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_lists_environments(home: Home):
    done = sgpu(home, "env", "list")
    assert done.returncode == 0, done.stderr
    assert "ai-4" in done.stdout
    bad = sgpu(home, "env", "prune", "--days", "x")
    assert bad.returncode == 2
    assert "not a number of days" in bad.stderr
