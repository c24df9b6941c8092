"""The doctor's findings about this Python, its torch and the driver's GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sgpu_magic.cli import python_checks
from sgpu_magic.cli.finding import Level
from sgpu_magic.cli.python_checks import ProbeFacts
from sgpu_magic.wire.devices import Device, Inventory

TORCH = ProbeFacts(torch="2.9.0", gpu_build="12.8", distributed=True, gloo=True, nccl=True, gpus=2)
A10, H100 = (
    Device(uuid="GPU-0", type="a10", name="NVIDIA A10", index=0),
    Device(uuid="GPU-1", type="h100", index=1, outside_use="process 17 (python) uses 3 GB"),
)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            ProbeFacts(gloo=True, group_error="RuntimeError: lo is down"),
            "could not reduce a tensor: RuntimeError: lo is",
        ),
        (
            ProbeFacts(gloo=True, error_output="its process was ended by signal 9"),
            "tensor: its process was ended by sig",
        ),
        (ProbeFacts(gloo=True, group_s=0.01, right=False), "two gloo ranks got a wrong sum"),
    ],
)
def test_a_group_that_does_not_work(facts: ProbeFacts, says: str):
    (found,) = python_checks.group(facts)
    assert (found.name, found.level) == ("all_reduce", Level.PROBLEM)
    assert says in found.text
    assert found.remedy


def test_without_gloo_no_group_is_reported():
    # the missing gloo is reported instead
    assert list(python_checks.group(ProbeFacts(torch="2.9.0"))) == []
    # the probe crashed before numpy, too
    found = list(python_checks.packages(ProbeFacts(error_output="Illegal instruction")))
    assert [(each.name, each.level) for each in found] == [("torch", Level.PROBLEM)]
    assert "can't be imported: Illegal instruction" in found[0].text


def test_a_probe_that_hangs_is_ended():
    facts = python_checks.probe(os.environ, timeout_s=0.01)
    assert facts == ProbeFacts(error_output="it took longer than 0 s")


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write a distribution's metadata only."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), "", ""]))


def test_requirements_that_are_not_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    needs = ("ipykernel>=6.29,!=7.0.*", "msgspec>=0.19", "pyzmq>=26", 'ray>=2.50; extra == "ray"', "torch>=2.6",
             'jupyterlab>=4.4; extra == "lab"', 'sphinx>=8; extra == "docs"')  # fmt: skip
    install(tmp_path, "sgpu-magic", "0.1.0", *needs)
    for name, version in (("ipykernel", "7.0.1"), ("msgspec", "0.19.0"), ("ray", "2.49.1"), ("sphinx", "7.0")):
        install(tmp_path, name, version)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = {each.name: (each.level, each.text) for each in python_checks.requirements()}
    assert found == {
        "ipykernel": (Level.PROBLEM, "7.0.1, and sgpu-magic needs ipykernel!=7.0.*,>=6.29"),
        "pyzmq": (Level.PROBLEM, "is not installed here"),
        "ray": (Level.WARNING, "2.49.1, and sgpu-magic needs ray>=2.50"),
    }


def test_requirements_that_are_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    install(tmp_path, "sgpu-magic", "0.1.0", "msgspec>=0.19", "torch>=2.6")
    install(tmp_path, "msgspec", "0.19.0")
    install(tmp_path, "torch", "2.6.0+cpu")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (found,) = python_checks.requirements()
    assert (found.name, found.level) == ("requirements", Level.OK)


def said_of(
    monkeypatch: pytest.MonkeyPatch, inventory: Inventory, facts: ProbeFacts, simulate: str = ""
) -> list[tuple[str, str, str, str]]:
    """The findings on a machine whose driver lists these devices: name, level, text and remedy."""
    monkeypatch.setattr(python_checks, "take_inventory", lambda **_: inventory)
    found = python_checks.gpus(facts, simulate)
    return [(each.name, each.level.value, each.text, each.remedy) for each in found]


def test_gpus_are_counted_and_those_in_use_are_named(monkeypatch: pytest.MonkeyPatch):
    count, busy, torch = said_of(monkeypatch, Inventory(host="h", devices=(A10, H100)), TORCH)
    assert count == ("gpu", "ok", "2 devices: NVIDIA A10, h100", "")
    assert busy[:3] == ("gpu", "warning", "H100 1 is in use outside the pool: process 17 (python) uses 3 GB")
    assert "--allow-busy" in busy[3]
    assert torch == ("torch and gpu", "ok", "built for CUDA 12.8, with NCCL", "")


@pytest.mark.parametrize(
    ("changed", "level", "says", "remedy"),
    [
        ({"gpu_build": ""}, "problem", "torch 2.9.0 was built without CUDA", "installation page of PyTorch"),
        ({"gpus": 0}, "problem", "(CUDA 12.8) can use none of the GPUs that the driver lists", "Update the NVIDIA"),
        ({"nccl": False}, "warning", "this torch has no NCCL", "Install a build with NCCL"),
        # a crash before the GPU check does not imply a GPU without NCCL
        ({"gpus": None}, "ok", "built for CUDA 12.8, with NCCL", ""),
    ],
)  # fmt: skip
def test_a_torch_that_can_not_use_the_gpus(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], level: str, says: str, remedy: str
):
    facts = ProbeFacts(**{name: getattr(TORCH, name) for name in TORCH.__struct_fields__} | changed)
    *_, found = said_of(monkeypatch, Inventory(host="h", devices=(A10,)), facts)
    assert found[:2] == ("torch and gpu", level)
    assert says in found[2]
    assert remedy in found[3]


def test_without_torch_nothing_is_said_of_torch_and_gpus(monkeypatch: pytest.MonkeyPatch):
    found = said_of(monkeypatch, Inventory(host="h", devices=(A10,)), ProbeFacts(torch_error="ImportError: no"))
    assert [each[0] for each in found] == ["gpu"]


def test_a_driver_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch):
    problem = "NVML can't be loaded: Driver/library version mismatch; reboot this machine."
    (found,) = said_of(monkeypatch, Inventory(host="h", problem=problem), TORCH)
    assert found[:3] == ("gpu", "problem", problem)


def test_simulated_devices_are_named_beside_the_real_ones(monkeypatch: pytest.MonkeyPatch):
    found = said_of(monkeypatch, Inventory(host="h"), TORCH, simulate="a10:4")
    assert [each[2] for each in found] == [
        "no GPU on this machine: ranks run on CPU with gloo", "simulated devices replace the real ones: a10:4",
    ]  # fmt: skip
