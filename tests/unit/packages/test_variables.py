"""Which environment variables are sent to another machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgpu_magic.packages.environment_variables import travelling
from sgpu_magic.packages.secrets import SecretsOf, blanked_settings

START = {
    "PATH": "/usr/bin",
    "HOME": "/home/ada",
    "HF_TOKEN": "hf_" + "abcdefghijklmnopqrst",
    "HF_HOME": "/home/ada/.cache/huggingface",
    "HF_HUB_OFFLINE": "1",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "2",
    "http_proxy": "http://proxy.example:3128",
    "HTTPS_PROXY": "http://me:pw@proxy.example:3128",
    "TEAM_NAME": "vision",
    "TEAM_SIZE": "4",
    "DB_PASSWORD": "hunter2",
    "VIRTUAL_ENV": "/home/ada/venv",
    "PYTHONPATH": "/home/ada/lib",
    "JPY_SESSION_NAME": "/home/ada/a.ipynb",
    "AWS_SECRET_ACCESS_KEY": "not-on-the-list",
    "CUDA_VISIBLE_DEVICES": "0",
}


def names(environ: dict[str, str], **options: object) -> set[str]:
    return set(travelling(environ, started_with=START, **options).values)  # pyright: ignore[reportArgumentType]


def test_those_of_libraries_travel_and_those_of_the_machine_stay():
    assert names(START) == {
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "http_proxy",
        "HTTPS_PROXY",
    }


def test_what_the_notebook_has_set_travels_but_not_where_its_kernel_is():
    environ = START | {
        "MY_FLAG": "on",
        "DB_PASSWORD": "changed",
        "HF_HOME": "/data/hf",
        "PATH": "/opt/bin",
        "PYTHONPATH": "/x",
        "JPY_PARENT_PID": "7",
        "TERM": "xterm-color",
        "PAGER": "cat",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    assert names(environ) - names(START) == {"MY_FLAG", "DB_PASSWORD", "HF_HOME"}


def test_given_ones_travel_whatever_they_are():
    assert names(START | {"PATH": "/mine"}, given=["PATH"]) - names(START) == {"PATH"}


@pytest.mark.parametrize(
    ("chosen", "further"),
    [
        ("TEAM_NAME", {"TEAM_NAME"}),
        ("TEAM_*", {"TEAM_NAME", "TEAM_SIZE"}),
        ("TEAM_", {"TEAM_NAME", "TEAM_SIZE"}),
        ("TEAM_NAME, AWS_*", {"TEAM_NAME", "AWS_SECRET_ACCESS_KEY"}),
        ("TEAM", set[str]()),
        ("", set[str]()),
    ],
)
def test_the_setting_names_further_ones(chosen: str, further: set[str]):
    assert names(START, chosen=chosen) - names(START) == further


def test_secrets_among_them_are_named():
    found = travelling(START | {"MY_KEY_ID": "7"}, started_with=START, chosen="DB_*")
    assert found.secrets == {"HF_TOKEN", "HTTPS_PROXY", "DB_PASSWORD"}
    assert found.values["DB_PASSWORD"] == "hunter2"


def test_what_a_process_was_started_with_is_read_from_the_system():
    code = (
        "import os\n"
        "os.environ['SET_LATER'] = 'a'\n"
        "from sgpu_magic.packages.environment_variables import start_variables, travelling\n"
        "os.environ['SET_LATEST'] = 'b'\n"
        "assert start_variables()['GIVEN'] == 'x'\n"
        "print(*sorted(travelling(os.environ).values))\n"
    )
    environ = {"GIVEN": "x", "PATH": "/usr/bin", "WANDB_MODE": "offline", "LC_CTYPE": "C.UTF-8"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["SET_LATER", "SET_LATEST", "WANDB_MODE"]


def test_a_cells_env_lines_lose_their_secrets_only():
    body = "%env DB_PASSWORD=hunter2  \n  %env A=hunter2x\n%set_env API_KEY abc def\nx = 'hunter2'\n%env OMP=1"
    assert blanked_settings(body, lambda text: text) == (
        "%env DB_PASSWORD=***  \n  %env A=hunter2x\n%set_env API_KEY ***\nx = 'hunter2'\n%env OMP=1"
    )


def test_a_blanker_follows_its_environment():
    secrets = SecretsOf()
    one = secrets.blanker({"A_TOKEN": "first-secret"})
    assert secrets.blanker({"A_TOKEN": "first-secret"}) is one
    assert one.clear("x first-secret y") == "x *** y"
    two = secrets.blanker({"A_TOKEN": "other-secret"})
    assert two.clear("first-secret other-secret") == "first-secret ***"
    assert two.is_in(b"..other-secret..")
    assert not two.is_in(b"..first-secret..")
