"""The keys of a Ray cluster's nodes, on a disk that is temporarily full."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgpu_magic.nodes.ray.agent_listener import NodeKeys, keep_port


def test_keys_that_can_not_be_written_are_valid_and_are_written_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    folder = tmp_path / "ray"
    keys = NodeKeys(folder / "nodes.json")
    # a missing folder stands in for a full disk
    first = keys.pair_of("a")
    assert keys.pair_of("a") == first
    assert keys.nodes == {first.public: "a"}
    keep_port("tcp://127.0.0.1:1234", folder)
    assert "can't be written" in capfd.readouterr().err
    folder.mkdir()
    keys.forget_others(["a"])
    assert NodeKeys(folder / "nodes.json").pair_of("a") == first
