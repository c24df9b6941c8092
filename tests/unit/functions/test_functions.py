"""`@distributed`, `Run` and `map` without a pool: options, arguments, stand-ins for functions, types."""

from __future__ import annotations

import enum
import functools
import inspect
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import importable_functions
import pytest

import sgpu_magic
from sgpu_magic import Run, distributed
from sgpu_magic.config import SEVEN_DAYS_S
from sgpu_magic.errors import UsageError
from sgpu_magic.options.python_form import checked, of_session
from sgpu_magic.payload import unpack
from sgpu_magic.payload.call import FunctionCall, RankValue, name_of
from sgpu_magic.payload.pack import pack_object
from sgpu_magic.runs.submit.pack_call import bind, by_reference
from sgpu_magic.views.cell_outputs import SweepProgress, SweepView, progress_html, progress_line

SUPPORT = Path(__file__).parents[2] / "support"


class Gpu(enum.Enum):
    H100 = "H100"


def train(rank: int, world_size: int, lr: float, *, steps: int = 3) -> tuple[int, int, float, int]:
    """Trains."""
    return rank, world_size, lr, steps


# ---------------------------------------------------------------- public names and types


def test_the_public_names_are_exactly_these():
    assert sgpu_magic.__all__ == [
        "Run",
        "__version__",
        "connect",
        "distributed",
        "load_ipython_extension",
        "map",
        "ray_launch",
        "tracking_uri",
        "unload_ipython_extension",
    ]
    assert set(sgpu_magic.__all__) <= set(dir(sgpu_magic))
    for name in sgpu_magic.__all__:
        assert getattr(sgpu_magic, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'submit'"):
        _ = sgpu_magic.submit  # pyright: ignore[reportAttributeAccessIssue]


def test_every_public_function_says_what_it_takes_and_raises():
    from sgpu_magic.functions.decorator import DistributedFunction, Launcher
    from sgpu_magic.functions.sweep import Sweep, SweepResults

    public: list[Any] = [
        distributed,
        sgpu_magic.map,
        sgpu_magic.connect,
        sgpu_magic.ray_launch,
        Run.from_id,
        Run.result,
        Run.logs,
    ]
    for one in public:
        assert "Raises:" in one.__doc__, one
        assert "Args:" in one.__doc__, one
    for cls in (Run, DistributedFunction, Launcher, Sweep, SweepResults):
        for name, member in vars(cls).items():
            if not name.startswith("_") and callable(member):
                assert inspect.getdoc(member), f"{cls.__name__}.{name} has no docstring"


@pytest.mark.slow
def test_a_program_with_types_is_understood_by_pyright():
    assert (Path(sgpu_magic.__file__).parent / "py.typed").exists()
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(SUPPORT / "typed_sample.py")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert "0 errors" in done.stdout, done.stdout


# ---------------------------------------------------------------- options


def test_options_are_the_magics_as_values():
    options = checked(
        num_gpus=8,
        gpu_type=Gpu.H100,
        remote=True,
        timeout="30m",
        wait=0,
        grace=timedelta(minutes=1),
        retries=2,
        retry_on="any",
        env={"A": "1"},
        name="tuned",
        exclude="big, other",
        allow_busy=True,
    )
    assert (options.ranks, options.device_type) == (8, "h100")
    assert (options.timeout_s, options.wait_s, options.grace_s) == (1800.0, 0.0, 60.0)
    assert (options.retries, options.retry_on_any, options.variables) == (2, True, {"A": "1"})
    assert (options.name, options.exclude, options.devices.allow_busy) == ("tuned", ("big", "other"), True)


def test_options_that_are_left_out_are_the_pools():
    options = checked()
    assert (options.ranks, options.device_type, options.pool) == (None, None, "")
    assert (options.timeout_s, options.wait_s, options.grace_s) == (SEVEN_DAYS_S, None, None)
    assert checked(remote=False).pool == "local"


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"gpus": 0}, "gpus=0 is not a number of ranks"),
        ({"gpus": True}, "gpus=True is not a number of ranks"),
        ({"num_gpus": "4"}, "num_gpus='4' is not a number of ranks"),
        ({"gpus": 2, "num_gpus": 4}, "are the same option"),
        ({"gpu_type": "h10"}, "is not a device type. Did you mean"),
        ({"gpu_type": 7}, "gpu_type: `7` is not a device type"),
        ({"remote": True}, "remote=True needs gpu_type"),
        ({"remote": False, "pool": "team"}, "remote=False selects this machine's own pool"),
        ({"timeout": "soon"}, "timeout is 'soon'; write a number with its unit"),
        ({"timeout": 0}, "it must be more than 0 s"),
        ({"timeout": timedelta(days=8)}, "at most 7 days"),
        ({"wait": timedelta(seconds=-1)}, "can't be negative"),
        ({"retries": -1}, "it must be 0 to 100"),
        ({"retry_on": "any"}, "add retries=N"),
        ({"retry_on": "sunday", "retries": 1}, "it can be failure, any"),
        ({"ui": "pretty"}, "it can be auto, widget, text, none"),
        ({"exclude": ["a b"]}, "not a variable's name"),
        ({"env": {"A=B": "1"}}, "env takes variable names"),
    ],
)
def test_an_option_that_means_nothing_is_refused_where_it_stands(options: dict[str, Any], output: str):
    with pytest.raises(UsageError) as raised:
        distributed(**options)
    assert output in raised.value.message


def test_an_unknown_option_is_a_type_error_that_lists_the_known():
    with pytest.raises(TypeError, match=r"no option 'gpu'.*gpus.*timeout"):
        distributed(gpu=2)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"gpus": 4, "nodes": 3}, "such as gpus=3, or leave nodes out."),
        ({"gpus": 4, "nodes": 2, "placement": "strict_pack"}, 'and placement="strict_pack" keeps them on one'),
        ({"idle": timedelta(seconds=-1)}, "can't be negative"),
        ({"timeout": timedelta(days=8)}, "at most 7 days"),
    ],
)
def test_a_session_that_means_nothing_is_refused_in_pythons_words(options: dict[str, Any], output: str):
    with pytest.raises(UsageError) as raised:
        sgpu_magic.connect(**options)
    assert output in raised.value.message
    assert "--" not in raised.value.message


def test_a_sessions_times_may_be_timedeltas():
    given = dict.fromkeys(inspect.signature(sgpu_magic.connect).parameters) | {"name": ""}
    hour = timedelta(hours=1)
    asked = of_session({**given, "idle": hour, "wait": hour, "timeout": hour})
    assert (asked.idle_s, asked.wait_s, asked.timeout_s) == (3600, 3600, 3600)


def test_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match=r"@distributed\(gpus=4\)"):
        distributed(4)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"gpus_per_task": 0}, "gpus_per_task=0"),
        ({"at_once": 0}, "at_once=0"),
        ({"gpu_type": "h10"}, "not a device type"),
    ],
)
def test_a_sweep_with_an_impossible_option_starts_nothing(options: dict[str, Any], output: str):
    with pytest.raises(UsageError, match=output):
        sgpu_magic.map(train, [1], **options)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- in a function's place


def test_the_function_itself_is_called_here_once():
    here = distributed(gpus=4)(train)
    assert here(0, 1, 0.5, steps=2) == (0, 1, 0.5, 2)
    assert (here.__name__, here.__doc__, here.__wrapped__) == ("train", "Trains.", train)
    assert inspect.signature(here) == inspect.signature(train)
    assert "gpus=4" in repr(here)


def test_options_make_another_function_and_leave_the_first_as_it_is():
    first = distributed(gpus=4, gpu_type="a10", env={"TOKEN": "secret"})(train)
    second = first.options(num_gpus=2, ui="none")
    assert "gpus=4" in repr(first)
    assert "num_gpus=2" in repr(second)
    assert "gpu_type='a10'" in repr(second)
    assert "secret" not in repr(second)
    with pytest.raises(UsageError):
        first.options(gpus=0)


def test_a_decorated_function_is_sent_by_its_name_where_a_module_has_it():
    assert pickle.loads(pickle.dumps(importable_functions.decorated)) is importable_functions.decorated
    assert by_reference(importable_functions.decorated.__sgpu_function__) is importable_functions.decorated
    assert by_reference(importable_functions.times) is importable_functions.times
    # other options do not change the function
    again = importable_functions.decorated.options(gpus=1)
    assert by_reference(again.__sgpu_function__) is importable_functions.decorated


def test_a_decorated_function_without_a_name_takes_its_function_along_but_no_secrets():
    made = distributed(gpus=3, env={"TOKEN": "secret"})(functools.partial(train, lr=0.1))
    data = pickle.dumps(made)
    assert b"secret" not in data
    assert pickle.loads(data)(0, 1) == (0, 1, 0.1, 3)


def test_decorating_twice_is_decorating_once():
    assert distributed(distributed(gpus=2)(train)).__sgpu_function__ is train


# ---------------------------------------------------------------- arguments


class Callable_:
    def __call__(self, x: int, rank: int) -> int:
        return x + rank

    def method(self, x: int, rank: int) -> int:
        return x - rank


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (train, "train"),
        (lambda x: x, "lambda"),
        (functools.partial(functools.partial(train, 0), 1), "train"),
        (Callable_(), "Callable_"),
        (Callable_().method, "method"),
        (int, "int"),
    ],
)
def test_a_run_has_the_functions_name(function: Callable[..., Any], name: str):
    assert name_of(function) == name


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "filled"),
    [
        (train, (), {"lr": 0.1}, {"rank", "world_size"}),
        (train, (5,), {"lr": 0.1}, {"world_size"}),
        (train, (5, 6, 0.1), {}, set()),
        (lambda device, *, local_rank: None, (), {}, {"device", "local_rank"}),
        # parameters with defaults keep them, and `**kwargs` requests nothing
        (lambda rank=7, **kwargs: None, (), {}, set()),
        (functools.partial(train, lr=0.1), (), {}, {"rank", "world_size"}),
        (Callable_(), (1,), {}, {"rank"}),
        (Callable_().method, (1,), {}, {"rank"}),
    ],
)
def test_what_is_left_out_and_a_rank_knows_is_filled_in(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], filled: set[str]
):
    bound_args, bound_kwargs = bind(FunctionCall(function, args, kwargs))
    values = [value for value in (*bound_args, *bound_kwargs.values()) if isinstance(value, RankValue)]
    assert {value.name for value in values} == filled


def test_positional_only_parameters_are_filled_in_too():
    def positional(rank: int, world_size: int, /, lr: float = 0.1) -> None: ...

    args, kwargs = bind(FunctionCall(positional, (), {}))
    assert [value.name for value in args if isinstance(value, RankValue)] == ["rank", "world_size"]
    assert not kwargs


@pytest.mark.parametrize(
    ("args", "kwargs", "output"),
    [
        ((), {}, "train() missing 1 required positional argument: 'lr'"),
        ((0, 1, 2, 3), {}, "train() takes 3 positional arguments but 4 "),
        ((), {"lr": 1, "step": 2}, "train() got an unexpected keyword argument 'step'"),
        ((0,), {"rank": 1, "lr": 1}, "train() got multiple values for argument 'rank'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_pythons_words(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: str
):
    with pytest.raises(TypeError) as raised:
        bind(FunctionCall(train, args, kwargs))
    assert output in str(raised.value)
    if args:
        assert "give the arguments after them by keyword" in raised.value.__notes__[0]


def test_c_code_without_a_signature_is_taken_as_it_is():
    assert bind(FunctionCall(dict, (), {"a": 1})) == ((), {"a": 1})


def test_a_call_fills_in_on_the_rank(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    args, kwargs = bind(FunctionCall(lambda rank, local_rank, world_size, device: None, (), {}))
    call = FunctionCall(lambda *given, **named: (given, named), args, kwargs)
    key = bytes(32)
    packed = pack_object(call, {}, key)
    arrived: Any = unpack.unpack(bytearray(packed.to_bytes()), packed.layout, key, {})
    given, named = arrived()
    assert [str(value) for value in (*given, *named.values())] == ["3", "1", "4", "cpu"]


# ---------------------------------------------------------------- the progress of a sweep


def sweep(**changes: Any) -> SweepView:
    return SweepView(**{"name": "trial", "done": 7, "running": 4, "failed": 1, "total": 20, "seconds": 12.4} | changes)


def test_the_progress_says_what_is_done_running_waiting_and_failed():
    assert progress_line(sweep()) == "trial · 7 of 20 done · 4 running · 8 waiting · 1 failed · 12.4 s"
    assert progress_line(sweep(total=None)) == "trial · 7 done · 4 running · 1 failed · 12.4 s"
    final = sweep(done=19, running=0, is_final=True)
    assert progress_line(final) == "trial · 19 of 20 done · 1 failed · 12.4 s"
    assert progress_line(sweep(ending="interrupted", is_final=True)) == (
        "trial · 7 of 20 done · 1 failed · interrupted · 12.4 s"
    )


def test_the_progress_bar_has_parts_of_the_whole_and_escapes_names():
    html = progress_html(sweep(name="<lambda>", failures=("item 3 · ValueError: <script>",)))
    assert "width:35.00%" in html
    assert "width:20.00%" in html
    assert "&lt;lambda&gt;" in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


def test_a_long_list_of_failures_ends():
    shown = io.StringIO()
    failures = tuple(f"item {index} · ValueError: bad" for index in range(30))
    progress = SweepProgress(shown, is_notebook=False)
    progress.show(sweep(failed=30, failures=failures), 0.0)
    assert shown.getvalue() == ""
    progress.show(sweep(failed=30, failures=failures, is_final=True), 1.0)
    lines = shown.getvalue().splitlines()
    assert lines[1:3] == ["item 0 · ValueError: bad", "item 1 · ValueError: bad"]
    assert lines[-1] == "and 20 more failures: .failures lists them all"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = Terminal()
    progress = SweepProgress(shown, is_notebook=False)
    assert not progress.is_due(10.0)
    assert progress.is_due(10.2)
    progress.show(sweep(), 10.2)
    assert not progress.is_due(10.3)
    progress.show(sweep(seconds=12.5), 10.4)  # only the elapsed time has changed
    progress.show(sweep(done=8), 10.5)
    progress.show(sweep(done=20, running=0, failed=0, is_final=True), 11.0)
    text = shown.getvalue()
    assert text.count("\n") == 1
    assert text.count("\r\x1b[K") == 3
    assert text.startswith("\r\x1b[K[##########..............] trial · 7 of 20 done")
    assert all(len(line) < 80 for line in text.replace("\x1b[K", "").split("\r"))
    assert text.endswith("trial · 20 of 20 done · 12.4 s\n")


def test_nothing_is_shown_without_a_wish():
    shown = io.StringIO()
    SweepProgress(shown, is_notebook=False, ui="none").show(sweep(is_final=True), 0.0)
    assert shown.getvalue() == ""


@pytest.fixture(scope="module", autouse=True)
def threads_before() -> set[threading.Thread]:
    """The threads that other modules' tests have left in this process."""
    return set(threading.enumerate())


def test_none_of_this_starts_a_thread(threads_before: set[threading.Thread]):
    started = set(threading.enumerate()) - threads_before
    assert not [thread.name for thread in started if thread.name.startswith("sgpu-")]
