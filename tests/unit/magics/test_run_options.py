"""Help of magics, settings that follow the environment, and which names are parameters of a run."""

from __future__ import annotations

import enum
import time
from pathlib import Path

import msgspec
import pytest

from sgpu_magic.client.pool import Pool
from sgpu_magic.config import Settings
from sgpu_magic.errors import UsageError
from sgpu_magic.magics.session_magics import SessionMagics
from sgpu_magic.options.argparse_form import LINE_PARSERS
from sgpu_magic.payload.call import FunctionCall, RankValue
from sgpu_magic.runs.submit.pack_call import arguments
from sgpu_magic.runs.submit.spec import scalars


@pytest.mark.parametrize("magic", ["sgpu_connect", "sgpu_disconnect", "sgpu_restart", "sgpu_auto"])
def test_a_magic_that_is_asked_for_help_prints_it(magic: str, capsys: pytest.CaptureFixture[str]):
    method = getattr(SessionMagics, magic)
    assert method(None, "-h") is None
    assert capsys.readouterr().out == LINE_PARSERS[magic]().format_help() + "\n"
    assert LINE_PARSERS[magic]().read_or_help("") is not None
    assert capsys.readouterr().out == ""


def test_settings_of_runs_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SGPU_CONFIG", str(tmp_path / "config.toml"))
    for name in ("SGPU_ENV_VERSION", "SGPU_TRACK", "SGPU_VARIABLES"):
        monkeypatch.delenv(name, raising=False)
    given = Settings(state_dir=str(tmp_path), variables="TEAM_*", grace_s=7.0)
    pool = Pool(given)
    # settings are not read again until something changes
    assert pool.settings is given
    monkeypatch.setenv("SGPU_ENV_VERSION", "4")
    monkeypatch.setenv("SGPU_TRACK", "off")
    # the pool's location and the pool's own settings do not change
    monkeypatch.setenv("SGPU_STATE_DIR", "/elsewhere")
    monkeypatch.setenv("SGPU_GRACE_S", "1")
    assert pool.settings == msgspec.structs.replace(given, env_version="4", track="off", variables="")
    monkeypatch.setenv("SGPU_VARIABLES", "OTHER_*")
    monkeypatch.setenv("SGPU_TRACK", "")
    assert (pool.settings.variables, pool.settings.track, pool.settings.env_version) == ("OTHER_*", "auto", "4")
    # without the variable, the value from the file applies again
    (tmp_path / "config.toml").write_text('env_version = "ai-4"\n')
    monkeypatch.delenv("SGPU_ENV_VERSION")
    assert pool.settings.env_version == "ai-4"
    monkeypatch.setenv("SGPU_TRACK", "perhaps")
    with pytest.raises(UsageError, match="SGPU_TRACK in the environment is 'perhaps'"):
        _ = pool.settings
    monkeypatch.setenv("SGPU_TRACK", "all")
    assert pool.settings.track == "all"


class Size(enum.IntEnum):
    BIG = 3


def test_scalars_are_numbers_truth_values_and_short_texts():
    values = {
        "lr": 1e-3, "epochs": 3, "amp": True, "name": "small", "rows": [1], "none": None, "size": Size.BIG,
        "long": "x" * 251, "empty": "", "_": 7, "_private": 1, "huge": 10**5000, "nan": float("nan"),
        "token": "hf_" + "a" * 34, "password": "hunter2", "url": "https://me:hunter2@host/x",
    }  # fmt: skip
    found = (("lr", "0.001"), ("epochs", "3"), ("amp", "True"), ("name", "small"), ("nan", "nan"))
    assert scalars(values) == found


def test_a_hundred_are_kept():
    assert len(scalars({f"x{number}": number for number in range(1000)})) == 100


def test_a_calls_arguments_have_their_parameters_names():
    def train(lr: float, *rest: int, epochs: int = 1, rank: int = 0, **more: object) -> None: ...

    found = arguments(FunctionCall(train, (0.1, 7, 8), {"epochs": 2, "rank": RankValue("rank"), "kind": "small"}))
    assert found == {"lr": 0.1, "rest[0]": 7, "rest[1]": 8, "epochs": 2, "kind": "small"}
    assert arguments(FunctionCall(dict, (), {"a": 1})) == {"a": 1}


def test_they_cost_next_to_nothing():
    values = {f"x{number}": number * 0.5 for number in range(20)} | {f"name{number}": "small" for number in range(10)}
    scalars(values)
    best = 1.0
    for _ in range(20):
        begin = time.perf_counter()
        scalars(values)
        best = min(best, time.perf_counter() - begin)
    assert best < 0.5e-3
