"""Job files: their keys, contradictory settings, and files that can't be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sgpu_magic.errors import UsageError
from sgpu_magic.options.job_form import (
    JobFile,
    defaults_of,
    job_timeout_s,
    read_accelerator,
    read_job_file,
    read_mapping,
    read_yaml,
    with_line,
)


def file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_paths_of_a_job_file_are_relative_to_its_folder(tmp_path: Path):
    (tmp_path / "packages.yaml").write_text("version: '4'")
    text = (
        "notebook: n.ipynb\nenvironment: packages.yaml\nupload: data\noutput: done/\nhardware_accelerator: gpu_8xH100"
    )
    made = read_job_file(file(tmp_path, "job.yaml", text))
    assert (made.gpus, made.type) == (8, "h100")
    assert made.env_version == str(tmp_path / "packages.yaml")
    assert made.upload == [str(tmp_path / "data")]
    assert made.output == f"{tmp_path}/done/"
    # the number of a base environment is not a file
    assert read_job_file(file(tmp_path, "other.yaml", "notebook: n.ipynb\nenv_version: 4")).env_version == "4"
    several = file(tmp_path, "several.json", '{"upload": ["a", "/b", ""]}')
    assert read_job_file(several).upload == [str(tmp_path / "a"), "/b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("environment: '4'\nenv_version: '5'", "environment and env_version are the same: leave one of them out"),
        ("hardware_accelerator: GPU_1xA10\ntype: a10", "leave gpus and type out"),
        ("hardware_accelerator: H100", "'H100' is not an accelerator; write the number and the type"),
        ("hardware_accelerator: GPU_5000xA10", "'GPU_5000xA10' is not an accelerator"),
        ("hardware_accelerator: GPU_1xa_b", "hardware_accelerator: .*a_b"),
        ("notebok: n.ipynb", "has the key `notebok`.* Did you mean `notebook`"),
        ("zzz: 1", "has the key `zzz`.* The keys are: notebook, "),
        ("gpus: many", "can't be used: .*int.*gpus"),
        ("- a\n- b", "is not a mapping of names to values at its top level"),
        ("notebook: [", "can't be read: "),
    ],
)
def test_a_job_file_that_can_not_be_meant(tmp_path: Path, text: str, says: str):
    path = file(tmp_path, "job.yaml", text)
    with pytest.raises(UsageError, match=says) as caught:
        read_job_file(path)
    assert caught.value.message.startswith(str(path))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gpus": 0}, "the command: gpus is 0; it must be 1 to "),
        ({"nodes": 10**9}, "the command: nodes is 1000000000; it must be 1 to "),
        ({"placement": "near"}, "the command: placement is 'near'; it can be pack, "),
        ({"upload": ["/nowhere/data"]}, "the command: upload: /nowhere/data does not exist"),
        ({"min_memory": "much"}, "the command: min_memory"),
        ({"type": "no type!"}, "the command: type"),
    ],
)
def test_options_that_mean_nothing(fields: dict[str, object], says: str):
    with pytest.raises(UsageError, match=says):
        defaults_of(JobFile(**fields), "the command")  # type: ignore[arg-type]


def test_a_relative_upload_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert defaults_of(JobFile(upload=["data"], gpus=2, type="A10"), "the command").upload == (str(tmp_path / "data"),)


def test_the_time_limit():
    assert job_timeout_s(JobFile(), "here") is None
    assert job_timeout_s(JobFile(timeout="1m"), "here") == 60
    assert job_timeout_s(JobFile(timeout_s=5), "here") == 5
    # the option on the command line overrides the file's, under either name
    assert job_timeout_s(with_line(JobFile(timeout_s=5), {"timeout": "2h"}), "here") == 7200
    with pytest.raises(UsageError, match="here: timeout and timeout_s are the same: leave one of them out"):
        job_timeout_s(JobFile(timeout="1m", timeout_s=60), "here")
    for nothing in (0, "0s", -1.0):
        with pytest.raises(UsageError, match=r"here: .*timeout"):
            job_timeout_s(JobFile(timeout=nothing), "here")


def test_a_line_is_merged_into_the_file():
    merged = with_line(
        JobFile(gpus=2, pool="a", parameters={"lr": 1, "n": 2}, env={"A": "1"}),
        {"gpus": 4, "parameters": {"lr": 3}, "env": {"B": "2"}},
    )
    assert merged == JobFile(gpus=4, pool="a", parameters={"lr": 3, "n": 2}, env={"A": "1", "B": "2"})


# ---------------------------------------------------------------- files of names and values


def test_mappings_are_read_by_their_suffix(tmp_path: Path):
    assert read_mapping(file(tmp_path, "a.json", '{"lr": 0.1}')) == {"lr": 0.1}
    assert read_mapping(file(tmp_path, "a.toml", "lr = 0.1")) == {"lr": 0.1}
    assert read_mapping(file(tmp_path, "a.yml", "lr: 0.1\nname: on the way")) == {"lr": 0.1, "name": "on the way"}
    # an empty file, or only comments
    assert read_mapping(file(tmp_path, "b.yaml", "# nothing yet\n")) == {}


def test_files_that_can_not_be_read(tmp_path: Path):
    missing = tmp_path / "missing.yaml"
    with pytest.raises(UsageError, match=f"{missing} can't be read: No such file"):
        read_mapping(missing)
    with pytest.raises(UsageError, match="has 1,000,001 bytes, which is too large for a file of names and values"):
        read_mapping(file(tmp_path, "large.json", " " * 1_000_001))
    for name, text in {"a.json": "{", "a.toml": "lr =", "a.yaml": "lr: [\n"}.items():
        with pytest.raises(UsageError, match=f"{name} can't be read: "):
            read_mapping(file(tmp_path, name, text))
    (tmp_path / "latin.yaml").write_bytes("name: ü".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.yaml can't be read: "):
        read_mapping(tmp_path / "latin.yaml")
    # YAML tags create no objects
    with pytest.raises(UsageError, match="could not determine a constructor"):
        read_mapping(file(tmp_path, "evil.yaml", "a: !!python/object/apply:os.getcwd []"))


def test_yaml_without_pyyaml_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"PyYAML is not installed.*pip install 'sgpu-magic\[run\]'"):
        read_yaml("a: 1")


@pytest.mark.parametrize(
    ("name", "made"), [("GPU_1xA10", (1, "a10")), ("gpu_8xh100", (8, "h100")), (" GPU_2xH200 ", (2, "h200"))]
)
def test_accelerators_have_databricks_names(name: str, made: tuple[int, str]):
    assert read_accelerator(name, "here") == made
