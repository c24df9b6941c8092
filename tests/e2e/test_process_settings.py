"""A rank is a process of its notebook: what calls have set in the notebook's process holds on ranks too."""

# ruff: noqa: E501  each setting stays on a few lines

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from kernels import Kernel


class Row(NamedTuple):
    """A setting: how it is set, how it is read, and how it is set back."""

    name: str
    set: str
    read: str
    back: str


LOGGERS = "[(h.level, h.formatter and h.formatter._fmt) for h in {0}.handlers], {0}.level, {0}.propagate"
ROWS = (
    Row(
        "dtype",
        "torch.set_default_dtype(torch.float64)",
        "torch.tensor(1.0).dtype",
        "torch.set_default_dtype(torch.float32)",
    ),
    Row("device", "torch.set_default_device('meta')", "torch.get_default_device()", "torch.set_default_device(None)"),
    Row(
        "matmul",
        "torch.set_float32_matmul_precision('high')",
        "torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32",
        "torch.set_float32_matmul_precision('highest')",
    ),
    Row(
        "cudnn",
        "torch.backends.cudnn.benchmark = True; torch.backends.cudnn.deterministic = True; torch.backends.cudnn.allow_tf32 = False",
        "torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32",
        "torch.backends.cudnn.benchmark = False; torch.backends.cudnn.deterministic = False; torch.backends.cudnn.allow_tf32 = True",
    ),
    Row(
        "sdp",
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.backends.cuda.flash_sdp_enabled()",
        "torch.backends.cuda.enable_flash_sdp(True)",
    ),
    Row(
        "reduction",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True",
    ),
    Row(
        "deterministic",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "torch.get_deterministic_debug_mode()",
        "torch.use_deterministic_algorithms(False)",
    ),
    Row(
        "anomaly",
        "torch.autograd.set_detect_anomaly(True, check_nan=False)",
        "torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()",
        "torch.autograd.set_detect_anomaly(False)",
    ),
    Row("grad", "torch.set_grad_enabled(False)", "torch.is_grad_enabled()", "torch.set_grad_enabled(True)"),
    Row(
        "sharing",
        "torch.multiprocessing.set_sharing_strategy('file_system')",
        "torch.multiprocessing.get_sharing_strategy()",
        "torch.multiprocessing.set_sharing_strategy('file_descriptor')",
    ),
    Row(
        "torch printing",
        "torch.set_printoptions(precision=2, sci_mode=False)",
        "torch.tensor([1 / 3, 1e-9], dtype=torch.float32, device='cpu')",
        "torch.set_printoptions(profile='default', sci_mode=None)",
    ),
    Row(
        "numpy printing",
        "np.set_printoptions(precision=3, suppress=True)",
        "np.array([1 / 3, 1e-9])",
        "np.set_printoptions(precision=8, suppress=False)",
    ),
    Row(
        "numpy errors",
        "np.seterr(divide='raise', under='warn');",
        "np.geterr()",
        "np.seterr(divide='warn', under='ignore');",
    ),
    Row(
        "pandas",
        "pd.options.display.max_rows = 7; pd.options.display.float_format = '{:.1f}'.format",
        "pd.options.display.max_rows, pd.Series([1 / 3])",
        "pd.options.display.max_rows = 60; pd.options.display.float_format = None",
    ),
    Row(
        "matplotlib",
        "import matplotlib as mpl; mpl.rcParams['figure.figsize'] = (3, 2); mpl.rcParams['axes.prop_cycle'] = mpl.cycler(color=['r', 'k'])",
        "__import__('matplotlib').rcParams['figure.figsize'], __import__('matplotlib').rcParams['axes.prop_cycle']",
        "mpl.rcParams.update(mpl.rcParamsDefault)",
    ),
    Row(
        "root logger",
        "logging.basicConfig(level=logging.INFO, format='%(levelname)s|%(message)s', force=True)",
        LOGGERS.format("logging.getLogger()"),
        "logging.getLogger().handlers.clear(); logging.getLogger().setLevel('WARNING')",
    ),
    Row(
        "own logger",
        "log = logging.getLogger('train'); log.setLevel(5); log.propagate = False; h = logging.StreamHandler(sys.stdout); h.setLevel(7); log.addHandler(h)",
        LOGGERS.format("logging.getLogger('train')"),
        "log.setLevel(0); log.propagate = True; log.handlers.clear()",
    ),
    Row(
        "library's logger",
        "logging.getLogger('torch.distributed').setLevel('ERROR')",
        "logging.getLogger('torch.distributed').level",
        "logging.getLogger('torch.distributed').setLevel(0)",
    ),
    Row(
        "logging",
        "logging.disable(logging.DEBUG); logging.captureWarnings(True)",
        "logging.root.manager.disable, warnings.showwarning.__module__",
        "logging.disable(logging.NOTSET); logging.captureWarnings(False)",
    ),
    Row(
        "warnings",
        "warnings.filterwarnings('ignore', 'not this', UserWarning); warnings.filterwarnings('error', category=pd.errors.PerformanceWarning)",
        "[f[0] for f in warnings.filters if f[1] and f[1].pattern == 'not this' or f[2] is pd.errors.PerformanceWarning]",
        "warnings.filters[:] = [f for f in warnings.filters if not (f[1] and f[1].pattern == 'not this' or f[2] is pd.errors.PerformanceWarning)]; warnings._filters_mutated()",
    ),
    Row(
        "decimal",
        "decimal.getcontext().prec = 5; decimal.getcontext().traps[decimal.Inexact] = True",
        "decimal.getcontext()",
        "decimal.setcontext(decimal.Context())",
    ),
    Row(
        "locale",
        "locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8');",
        "locale.setlocale(locale.LC_NUMERIC)",
        "locale.setlocale(locale.LC_NUMERIC, 'C');",
    ),
    Row("recursion", "sys.setrecursionlimit(4321)", "sys.getrecursionlimit()", "sys.setrecursionlimit(3000)"),
    Row(
        "digits", "sys.set_int_max_str_digits(9999)", "sys.get_int_max_str_digits()", "sys.set_int_max_str_digits(4300)"
    ),
    Row("switches", "sys.setswitchinterval(0.25)", "sys.getswitchinterval()", "sys.setswitchinterval(0.005)"),
    Row(
        "collector",
        "gc.disable(); gc.set_threshold(900, 9, 8)",
        "gc.isenabled(), gc.get_threshold()",
        "gc.enable(); gc.set_threshold(700, 10, 10)",
    ),
    Row("sockets", "socket.setdefaulttimeout(33)", "socket.getdefaulttimeout()", "socket.setdefaulttimeout(None)"),
    Row(
        "start method",
        "multiprocessing.set_start_method('spawn', force=True)",
        "multiprocessing.get_start_method()",
        "multiprocessing.set_start_method('fork', force=True)",
    ),
    Row("umask", "os.umask(0o027);", "(mask := os.umask(0o027), os.umask(mask))[0]", "os.umask(0o022);"),
    Row(
        "time zone",
        "os.environ['TZ'] = 'ABC-3'; time.tzset()",
        "time.tzname[0], time.timezone",
        "os.environ['TZ'] = 'UTC'; time.tzset()",
    ),
)
IMPORTS = "import torch, numpy as np, pandas as pd, logging, warnings, decimal, locale, sys, gc, socket, multiprocessing, os, time"


def readings(kernel: Kernel) -> dict[str, str]:
    return kernel.value("{name: repr(eval(read)) for name, read in reads.items()}")


def on_ranks(kernel: Kernel, line: str) -> list[dict[str, str]]:
    kernel.check(
        f"%%distributed {line} --out seen:all --ui none\n{IMPORTS}\n"
        "seen = {name: repr(eval(read)) for name, read in reads.items()}"
    )
    return kernel.value("seen")


def differing(seen: dict[str, str], there: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {name: (value, there[name]) for name, value in seen.items() if there[name] != value}


def test_a_plain_notebook_has_no_settings_to_send(new_kernel):
    kernel: Kernel = new_kernel()
    kernel.check(
        "from sgpu_magic.system.process_settings.notebook_settings import read_settings\nimport json, warnings"
    )
    reading = "read = json.dumps(sorted(read_settings()))"
    kernel.check(reading)
    assert json.loads(kernel.value("read")) == []
    kernel.check(f"with warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n    {reading}")
    assert json.loads(kernel.value("read")) == ["warnings/filters"]


@pytest.mark.slow
def test_settings_of_the_notebook_hold_on_ranks(new_kernel):
    kernel: Kernel = new_kernel()
    kernel.check(f"{IMPORTS}\nreads = { ({row.name: row.read for row in ROWS})!r}")
    default = readings(kernel)
    assert on_ranks(kernel, "-n 1") == [default]
    for row in ROWS:
        kernel.check(row.set)
    changed = readings(kernel)
    assert changed.keys() == default.keys()
    assert not [name for name in changed if changed[name] == default[name]]
    for there in on_ranks(kernel, "-n 2"):
        assert differing(changed, there) == {}
    # in a session they follow the notebook's, and a rank's own value stays until the notebook's changes
    kernel.check("%sgpu_connect -n 1 --type cpu")
    assert differing(changed, on_ranks(kernel, "")[0]) == {}
    kernel.check("%%distributed --ui none\nsys.setrecursionlimit(2222)")
    for row in ROWS:
        if row.name != "recursion":
            kernel.check(row.back)
    back = readings(kernel)
    there = on_ranks(kernel, "")[0]
    assert there.pop("recursion") == "2222"
    assert differing(there, back) == {}
    kernel.check("%sgpu_disconnect")


@pytest.mark.slow
def test_log_lines_and_warnings_appear_as_in_the_notebook(new_kernel):
    kernel: Kernel = new_kernel()
    kernel.check(
        "import logging, warnings\n"
        "logging.basicConfig(level=logging.INFO, format='%(levelname)s|%(message)s')\n"
        "log = logging.getLogger('train')\n"
        "class Own(logging.Handler):\n    def emit(self, record): pass\n"
        "log.addHandler(Own())\n"
        "warnings.simplefilter('ignore')"
    )
    cell = "%%distributed -n 1 --ui text\nlog.info('step'); warnings.warn('unwanted'); logging.getLogger('other').debug('no')"
    reply = kernel.check(cell)
    assert "INFO|step" in reply.text
    assert "UserWarning" not in reply.text
    assert "no" not in reply.lines(0)
    # settings that can't be transferred are reported once
    assert "the Own of logger train" in reply.text
    assert "the Own of logger train" not in kernel.check(cell).text
