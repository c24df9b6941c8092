"""Where uv looks packages up: the setting, else what uv finds by itself, else what pip is configured with."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from platformdirs import site_config_path, user_config_path

# any of these and uv has been told where to look
_UV_INDEXES = ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")


def index_variables(index_url: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that a uv process gets beside the others. They may hold credentials.

    uv does not read pip's configuration. A machine where only pip knows the way to its packages has to work all the
    same; of several indexes the best version is then taken, as pip does.

    Args:
        index_url: The setting `index_url`.
        environ: The variables that the uv process gets otherwise.
    """
    environ = os.environ if environ is None else environ
    if index_url:
        return {"UV_DEFAULT_INDEX": index_url, "UV_INDEX_URL": index_url}
    if any(environ.get(name) for name in _UV_INDEXES) or _has_uv_configuration(environ):
        return {}
    pip = _pip_configuration(environ)
    found: dict[str, str] = {}
    if pip.get("index-url"):
        found["UV_DEFAULT_INDEX"] = pip["index-url"]
    if pip.get("extra-index-url"):
        found["UV_INDEX"] = " ".join(pip["extra-index-url"].split())
        found["UV_INDEX_STRATEGY"] = environ.get("UV_INDEX_STRATEGY", "unsafe-best-match")
    if pip.get("find-links"):
        found["UV_FIND_LINKS"] = ",".join(pip["find-links"].split())
    return found


def _has_uv_configuration(environ: Mapping[str, str]) -> bool:
    if environ.get("UV_CONFIG_FILE"):
        return True
    folders = (user_config_path("uv", appauthor=False), site_config_path("uv", appauthor=False), Path("/etc/uv"))
    return any((folder / "uv.toml").is_file() for folder in folders)


def _pip_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """pip's options about indexes: of the machine, the user, the environment, then variables; the last one counts."""
    home = Path(environ.get("HOME") or Path.home())
    files = [
        site_config_path("pip", appauthor=False) / "pip.conf",
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        user_config_path("pip", appauthor=False) / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    if environ.get("PIP_CONFIG_FILE"):
        files.append(Path(environ["PIP_CONFIG_FILE"]))
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)
        except (OSError, configparser.Error, UnicodeDecodeError):
            # pip itself says what is wrong with it
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                found.update(parser.items(section))
    for name in ("index-url", "extra-index-url", "find-links"):
        value = environ.get(f"PIP_{name.replace('-', '_').upper()}")
        if value:
            found[name] = value
    return found
