"""`serverless_gpu`: found only after all other finders, free until it is used, and behaves as documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sgpu_magic.functions.compat
from sgpu_magic.client.pools_file import add_pool, new_entry
from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat import CompatFinder, decorators


def python(code: str, *, path: Path | None = None) -> str:
    """Run a separate program and return what it prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---------------------------------------------------------------- the finder


def test_without_this_package_there_is_none():
    assert python("import importlib.util as u, sgpu_magic; print(u.find_spec('serverless_gpu'))") == "None"


def test_nothing_is_imported_until_it_is_asked_for():
    code = (
        "import sys, sgpu_magic.functions.compat\n"
        "print([name for name in sys.modules if name.startswith('serverless_gpu')])\n"
        "from serverless_gpu import runtime\n"
        "from serverless_gpu.compute import GPUType\n"
        "lazy = ('torch', 'zmq', 'IPython', 'sgpu_magic.functions.decorator')\n"
        "print([name for name in lazy if name in sys.modules])\n"
        "from serverless_gpu import distributed\n"
        "print('torch' in sys.modules)\n"
    )
    assert python(code).splitlines() == ["[]", "[]", "False"]


def test_it_comes_last_and_once():
    sgpu_magic.functions.compat.install()
    assert [type(finder) for finder in sys.meta_path].count(CompatFinder) == 1
    assert python("import sys, sgpu_magic.functions.compat; print(type(sys.meta_path[-1]).__name__)") == "CompatFinder"


@pytest.mark.parametrize("before", ["", "import serverless_gpu_plugin;"])
def test_the_real_package_wins(tmp_path: Path, before: str):
    (tmp_path / "serverless_gpu").mkdir()
    (tmp_path / "serverless_gpu" / "__init__.py").write_text("distributed = 'the real one'")
    (tmp_path / "serverless_gpu_plugin.py").write_text("")
    code = f"import sgpu_magic.functions.compat; {before} import serverless_gpu; print(serverless_gpu.distributed)"
    assert python(code, path=tmp_path) == "the real one"


@pytest.mark.parametrize("module", ["serverless_gpu.tables", "serverless_gpu_plugin", "sgpu_magic.serverless_gpu"])
def test_other_names_are_not_found(module: str):
    with pytest.raises(ModuleNotFoundError):
        __import__(module)


def test_the_documented_names_are_there():
    code = (
        "import sgpu_magic.functions.compat, serverless_gpu\n"
        "from serverless_gpu import distributed\n"
        "from serverless_gpu import runtime as rt\n"
        "from serverless_gpu.compute import GPUType\n"
        "from serverless_gpu.ray import ray_launch\n"
        "from serverless_gpu.launcher import distributed as same\n"
        "assert same is distributed is serverless_gpu.distributed\n"
        "print(*rt.__all__)\n"
    )
    expected = "get_global_rank get_local_rank get_local_world_size get_node_rank get_world_size"
    assert python(code) == expected


NOT_INSTALLED = (
    "from importlib.machinery import PathFinder\n"
    "find = PathFinder.find_spec\n"
    "PathFinder.find_spec = lambda name, *rest: None if name == 'databricks' else find(name, *rest)\n"
)


def test_the_successors_names_are_there_behind_an_installed_one(tmp_path: Path):
    code = (
        "import sgpu_magic.functions.compat\n"
        "from databricks.air import distributed, ray_init, ray_launch\n"
        "import databricks\n"
        "print(distributed.__module__, hasattr(databricks, 'installed'))\n"
    )
    ours = "sgpu_magic.functions.compat.decorators"
    assert python(NOT_INSTALLED + code) == f"{ours} False"
    (tmp_path / "databricks").mkdir()
    (tmp_path / "databricks" / "__init__.py").write_text("installed = True")
    assert python(code, path=tmp_path) == f"{ours} True"
    (tmp_path / "databricks" / "air.py").write_text("def distributed(): ...\nray_init = ray_launch = distributed")
    assert python(code, path=tmp_path) == "databricks.air True"


@pytest.mark.slow
def test_the_successors_data_are_those_of_serverless_gpu():
    code = "import sgpu_magic.functions.compat\nfrom databricks.air.data import UCVolumeDataset\nprint(UCVolumeDataset)"
    assert "serverless_gpu.data.UCVolumeDataset" in python(NOT_INSTALLED + code)


def test_ray_init_connects_to_the_cluster_of_a_run_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    from sgpu_magic.functions.compat.databricks_air import ray_init

    with pytest.raises(UsageError, match="@ray_launch"):
        ray_init()


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({"accelerator_type": "GPU_8xH100"}, (8, "h100")),
        ({"accelerator_type": "GPU_8xH100", "num_accelerators": 16}, (16, "h100")),
        ({"num_accelerators": 2}, (2, None)),
    ],
)
def test_accelerators_of_the_successor(asked: dict[str, Any], chosen: tuple[int, str | None]):
    function = decorators.air_distributed(**asked)(print)
    assert (function._options.ranks, function._options.device_type) == chosen


def test_a_number_that_nodes_do_not_have_is_refused():
    with pytest.raises(UsageError, match="use a multiple of 8"):
        decorators.air_distributed(accelerator_type="GPU_8xH100", num_accelerators=4)


# ---------------------------------------------------------------- what the names do


def test_a_gpu_type_is_its_name():
    from serverless_gpu.compute import GPUType

    assert [str(member) for member in GPUType] == ["a10", "h100"]
    assert GPUType.H100 == "h100"
    assert GPUType("a10") is GPUType.A10


def test_runtime_tells_what_torchrun_says(monkeypatch: pytest.MonkeyPatch):
    from serverless_gpu import runtime as rt

    values = {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 1}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    asked = (rt.get_global_rank, rt.get_local_rank, rt.get_world_size, rt.get_local_world_size, rt.get_node_rank)
    assert [ask() for ask in asked] == [5, 1, 8, 4, 1]

    class Group:
        def rank(self) -> int:
            return 2

    assert rt.get_global_rank(Group()) == rt.get_global_rank(group=Group()) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 8, "gpu_type": "H100"},
        {"gpus": 8, "gpu_type": "h100", "remote": True},
        {"num_gpus": 8, "gpu_type": "A10", "remote": False},
        {"gpus": 4, "gpu_type": sgpu_magic.functions.compat, "remote": True},
        {"gpus": 8, "gpu_type": "A10", "remote": True, "run_async": True},
        {"gpus": 8, "gpu_type": "H100", "timeout": 3 * 3600},
        {"gpus": 8, "timeout": None},
    ],
)
def test_distributed_takes_the_documented_options(options: dict[str, object]):
    from serverless_gpu import distributed
    from serverless_gpu.compute import GPUType

    if options.get("gpu_type") is sgpu_magic.functions.compat:
        options["gpu_type"] = GPUType.A10

    @distributed(**options)
    def double(value: int) -> int:
        """Twice the value."""
        return 2 * value

    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Twice the value.")
    assert callable(double.distributed)


def test_an_option_that_nobody_has_documented_is_told():
    from serverless_gpu import distributed

    with pytest.raises(TypeError, match="no option 'gpu'"):
        distributed(gpu=4)


def test_ray_launch_is_the_decorator_under_its_documented_name():
    from serverless_gpu.ray import ray_launch

    @ray_launch(gpus=4, gpu_type="A10", remote=True)
    def tune(trials: int = 3) -> int:
        """Tunes."""
        return trials

    assert (tune(), tune(trials=2), tune.__name__) == (3, 2, "tune")
    with pytest.raises(TypeError, match="trails"):
        tune.distributed(trails=2)
    with pytest.raises(UsageError, match="gpus=0"):
        ray_launch(gpus=0)
    with pytest.raises(UsageError, match="session= names existing ones") as raised:
        ray_launch(gpus=4, session="work")
    assert "\n" not in raised.value.message
    with pytest.raises(UsageError, match=r"ray\.timeline\(\)"):
        ray_launch(gpus=4, profile=True)


# ---------------------------------------------------------------- pools


@pytest.mark.parametrize(
    ("variables", "output"),
    [
        ({}, ""),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": "false", "DATABRICKS_USE_POOL": "0"}, ""),
        ({"DATABRICKS_REMOTE_GPU_POOL_ID": "local"}, ""),
        (
            {"DATABRICKS_REMOTE_GPU_POOL_ID": "team-7"},
            "DATABRICKS_REMOTE_GPU_POOL_ID names the pool 'team-7', which is not known here; the run goes to the pool "
            "'local'. `sgpu pool add` lists others.",
        ),
        (
            {"DATABRICKS_USE_RESERVED_GPU_POOL": "True"},
            "DATABRICKS_USE_RESERVED_GPU_POOL asks for a reserved pool, and none is known here; the run goes to the "
            "pool 'local'. `sgpu pool add` lists others.",
        ),
        (
            {"DATABRICKS_USE_POOL": "1"},
            "DATABRICKS_USE_POOL asks for an on-demand pool, and none is known here; the run goes to the pool 'local'. "
            "`sgpu pool add` lists others.",
        ),
    ],
)
def test_what_becomes_of_a_chosen_pool(variables: dict[str, str], output: str, tmp_path: Path):
    environ = {"SGPU_CONFIG": str(tmp_path / "none.toml"), **variables}
    assert decorators.chosen_pool(environ)[1] == output


@pytest.mark.parametrize(
    ("variables", "pool"),
    [
        ({}, ""),
        ({"DATABRICKS_REMOTE_GPU_POOL_ID": "cloud", "DATABRICKS_USE_RESERVED_GPU_POOL": "1"}, "cloud"),
        ({"DATABRICKS_REMOTE_GPU_POOL_ID": "local"}, "local"),
        ({"DATABRICKS_USE_RESERVED_GPU_POOL": "1", "DATABRICKS_USE_POOL": "1"}, "reserved"),
        ({"DATABRICKS_USE_POOL": "yes"}, "on-demand"),
    ],
)
def test_a_pool_that_is_listed_is_chosen_by_the_variables(variables: dict[str, str], pool: str, tmp_path: Path):
    file = tmp_path / "pools.toml"
    for name, reserved in (("team", True), ("cloud", False)):
        add_pool(new_entry(name, f"tcp://{name}.example.org:8700", "k" * 40, reserved=reserved), file)
    environ = {"SGPU_CONFIG": str(tmp_path / "none.toml"), "SGPU_POOLS_FILE": str(file), **variables}
    assert decorators.chosen_pool(environ) == (pool, "")


def test_the_most_exact_choice_counts(tmp_path: Path):
    environ = {"SGPU_CONFIG": str(tmp_path / "none.toml"), "DATABRICKS_USE_POOL": "yes"}
    assert decorators.chosen_pool(environ)[1].startswith("DATABRICKS_USE_POOL")
    environ["DATABRICKS_USE_RESERVED_GPU_POOL"] = "yes"
    assert decorators.chosen_pool(environ)[1].startswith("DATABRICKS_USE_RESERVED_GPU_POOL")
    environ["DATABRICKS_REMOTE_GPU_POOL_ID"] = "team-7"
    assert decorators.chosen_pool(environ)[1].startswith("DATABRICKS_REMOTE_GPU_POOL_ID")


def test_another_number_of_ranks_keeps_the_chosen_pool():
    def train() -> None: ...

    decorated = decorators.distributed(gpus=1)(train)
    assert type(decorated.options(gpus=2)) is type(decorated)
    driver = decorators.ray_launch(gpus=1)(train)
    assert type(driver.options(gpus=2)) is type(driver)
    assert repr(driver.options(gpus=2)).startswith("<ray_launch ")
