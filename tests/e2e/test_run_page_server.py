"""A run's page over the Jupyter server's REST: code, options, phases, environment and files of real runs."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from homes import Home
from jupyter_servers import JupyterServer
from server_kernels import ServerKernel, loaded_kernel
from waiting import eventually

CELL = """\
%%distributed -n 2 --name {name} --timeout 90s --env TOKEN_OF_MINE=not-to-be-seen
# Fit the line
import os
folder = os.environ['SGPU_CHECKPOINT_DIR']
os.makedirs(folder, exist_ok=True)
if rank == 0:
    open(os.path.join(folder, 'état 1.html'), 'w').write('<script>alert(1)</script>')
print(len(weights) * rate)
"""


@pytest.fixture(scope="module")
def run(server: JupyterServer, server_home: Home) -> Iterator[str]:
    """The path of a run that has ended."""
    with loaded_kernel(server) as kernel:
        yield f"sgpu/runs/{_ended_run(server, kernel, server_home, 'fitted')}"


def _ended_run(server: JupyterServer, kernel: ServerKernel, server_home: Home, name: str) -> str:
    kernel.run("weights, rate = bytes(50_000), 0.25")
    kernel.run(CELL.format(name=name))
    found = server_home.run_named(name)
    eventually(lambda: server.get(f"sgpu/runs/{found}/outputs").status == 200, 20, "the run does not end")
    return found


def _table(named: list[dict[str, Any]]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in named}


def test_a_page_has_the_code_and_the_options_without_values_of_variables(server: JupyterServer, run: str):
    answer = server.get(f"{run}/page")
    assert answer.status == 200, answer
    page = answer.body
    assert page["code"][0]["text"].startswith("# Fit the line\n")
    assert page["magic_line"].startswith("%%distributed -n 2 --name fitted")
    assert _table(page["options"]) == {"--gpus": "2", "--timeout": "90 s", "--env": "TOKEN_OF_MINE"}
    assert _table(page["parameters"]) == {"rate": "0.25"}
    assert "not-to-be-seen" not in str(page)


def test_a_page_says_when_each_phase_was_and_what_was_shipped(server: JupyterServer, run: str):
    page = server.get(f"{run}/page").body
    names = [phase["name"] for phase in page["phases"]]
    assert names[0] == "queued"
    assert names[-1] == "running"
    assert not any(phase["current"] for phase in page["phases"])
    total = sum(phase["seconds"] for phase in page["phases"])
    assert page["submitted_at"] < page["started_at"] < page["submitted_at"] + total
    sizes = {each["name"]: each["size"] for each in page["shipped"]}
    assert 50_000 <= sizes["weights"] < 51_000
    assert sizes["rate"] < 100
    assert page["shipped_bytes"] > 50_000


def test_the_files_of_a_run_are_listed_and_downloaded_but_not_rendered(server: JupyterServer, run: str):
    files = server.get(f"{run}/files").body
    assert [(each["name"], each["size"]) for each in files["files"]] == [("checkpoints/état 1.html", 25)]
    assert files["more"] is False
    assert files["cwd"] == str(server.home.work)
    url = f"{server.url}/{run}/files/checkpoints/%C3%A9tat%201.html"
    request = urllib.request.Request(url, headers={"Authorization": f"token {server.token}"})
    with urllib.request.urlopen(request, timeout=40) as answer:
        assert answer.read() == b"<script>alert(1)</script>"
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["Content-Disposition"] == "attachment; filename*=UTF-8''%C3%A9tat%201.html"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "name", ["key", "run.json", "checkpoints/../key", "checkpoints/%2e%2e/key", "checkpoints/absent"]
)
def test_no_other_file_of_the_runs_directory_is_given(server: JupyterServer, run: str, name: str):
    assert server.get(f"{run}/files/{name}").status == 404


def test_without_a_token_neither_page_nor_file_is_given(server: JupyterServer, run: str):
    for path in ("page", "files", "files/checkpoints/%C3%A9tat%201.html"):
        assert server.get(f"{run}/{path}", token="wrong").status in (401, 403)


def test_the_environment_is_compared_with_the_notebooks_previous_run(server: JupyterServer, server_home: Home):
    with loaded_kernel(server) as kernel:
        kernel.run("import os; os.environ['JPY_SESSION_NAME'] = os.path.abspath('compared.ipynb')")
        first = _ended_run(server, kernel, server_home, "compared_one")
        second = _ended_run(server, kernel, server_home, "compared_two")
        assert server.get(f"sgpu/runs/{first}/page").body["environment"] is None

        def environment() -> dict[str, Any] | None:
            return server.get(f"sgpu/runs/{second}/page").body["environment"]

        # `run.json` is written after the run's end
        eventually(lambda: environment() is not None, 20, "no record of the environment")
        assert environment() == {"run": first[:4], "changes": []}
        record = server_home.state / "runs" / first / "run.json"
        record.write_text(json.dumps(json.loads(record.read_bytes()) | {"host": "elsewhere"}))
        changes = {each["name"]: each["before"] for each in (environment() or {})["changes"]}
        assert changes == {"machine": "elsewhere"}
