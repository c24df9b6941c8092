"""Names that MLflow accepts as keys of metrics, parameters and tags."""

from __future__ import annotations

import re

# characters in keys and maximum lengths, from mlflow.utils.validation
_NOT_IN_KEYS = re.compile(r"[^\w./: -]", re.ASCII)
_KEY_LENGTH = 250


def mlflow_key(text: str) -> str:
    """Return a name as a valid MLflow key: other characters become `_`, and parts such as `..` are removed."""
    parts = [part for part in _NOT_IN_KEYS.sub("_", text).strip().split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:_KEY_LENGTH].rstrip("/ ") or "_"
