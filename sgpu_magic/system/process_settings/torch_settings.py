"""The settings of torch."""

# modules are only accessed through `sys.modules`, without types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgpu_magic.system.process_settings.setting_group import Setting, SettingTable, attribute_setting, call_setting

_SDP = ("flash", "mem_efficient", "math", "cudnn")


def _default_device(torch: Any) -> str:
    # without the GPU's index, because each rank has its own GPU
    return torch.get_default_device().type


def _set_default_device(torch: Any, kind: str) -> None:
    if kind != "cuda" or torch.cuda.is_available():
        torch.set_default_device(kind)


def _set_sdp(torch: Any, enabled: Sequence[bool]) -> None:
    for kind, is_enabled in zip(_SDP, enabled, strict=True):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_enabled)


def _set_print_options(torch: Any, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        setattr(torch._tensor_str.PRINT_OPTS, name, value)


TORCH = SettingTable(
    "torch",
    {
        "default_dtype": Setting(
            lambda torch: str(torch.get_default_dtype()).rpartition(".")[2],
            lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
            "float32",
        ),
        "default_device": Setting(_default_device, _set_default_device, "cpu"),
        "float32_matmul_precision": call_setting(
            "get_float32_matmul_precision", "set_float32_matmul_precision", default="highest"
        ),
        "matmul_tf32": attribute_setting("backends.cuda.matmul.allow_tf32", default=False),
        "fp16_reduction": attribute_setting(
            "backends.cuda.matmul.allow_fp16_reduced_precision_reduction", default=True
        ),
        "bf16_reduction": attribute_setting(
            "backends.cuda.matmul.allow_bf16_reduced_precision_reduction", default=True
        ),
        "cudnn_tf32": attribute_setting("backends.cudnn.allow_tf32", default=True),
        "cudnn_enabled": attribute_setting("backends.cudnn.enabled", default=True),
        "cudnn_benchmark": attribute_setting("backends.cudnn.benchmark", default=False),
        "cudnn_deterministic": attribute_setting("backends.cudnn.deterministic", default=False),
        "sdp": Setting(
            lambda torch: [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _SDP],
            _set_sdp,
            [True for _ in _SDP],
        ),
        "deterministic": call_setting("get_deterministic_debug_mode", "set_deterministic_debug_mode", default=0),
        "fill_uninitialized_memory": attribute_setting("utils.deterministic.fill_uninitialized_memory", default=True),
        "anomaly": Setting(
            lambda torch: [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
            lambda torch, value: torch.autograd.set_detect_anomaly(*value),
            [False, True],
        ),
        "grad": call_setting("is_grad_enabled", "set_grad_enabled", default=True),
        "warn_always": call_setting("is_warn_always_enabled", "set_warn_always", default=False),
        "sharing_strategy": call_setting(
            "multiprocessing.get_sharing_strategy", "multiprocessing.set_sharing_strategy", default="file_descriptor"
        ),
        "print_options": Setting(
            lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
            _set_print_options,
            {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None},
        ),
    },
)
