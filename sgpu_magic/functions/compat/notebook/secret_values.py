"""`dbutils.secrets`: from environment variables, else from the system's keyring.

The variable of the key `hf-token` in the scope `team` is `SGPU_SECRET_TEAM__HF_TOKEN`: scope and key in capitals, with
an underscore for every character that is no letter or digit, and two between them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from typing import Any, NamedTuple

from sgpu_magic.errors import UsageError
from sgpu_magic.functions.compat.notebook.utility import Utility

_PREFIX = "SGPU_SECRET_"
_BETWEEN = "__"


class SecretScope(NamedTuple):
    """A scope, as `dbutils.secrets.listScopes` returns it."""

    name: str


class SecretMetadata(NamedTuple):
    """A key of a scope, as `dbutils.secrets.list` returns it."""

    key: str


Keys = list[SecretMetadata]
Scopes = list[SecretScope]


class Secrets(Utility):
    """Secrets from variables SGPU_SECRET_SCOPE__KEY, or from the system's keyring if `keyring` is installed."""

    path = "dbutils.secrets"

    def get(self, scope: str, key: str) -> str:
        """Return a secret."""
        variable = variable_of(scope, key)
        value = os.environ.get(variable)
        value = _from_keyring(scope, key) if value is None else value
        if value is None:
            raise UsageError(
                f"there is no secret {key!r} in the scope {scope!r}. Set the variable {variable} before the kernel "
                f"starts, or store it with `keyring set {scope} {key}`."
            )
        return value

    def getBytes(self, scope: str, key: str) -> bytes:
        """Return a secret as bytes."""
        return self.get(scope, key).encode()

    def list(self, scope: str) -> Keys:
        """Return the keys of a scope that variables hold, in lower case. A keyring can't be listed."""
        prefix = f"{_PREFIX}{_word(scope)}{_BETWEEN}"
        found = sorted(name.removeprefix(prefix) for name in os.environ if name.startswith(prefix))
        return [SecretMetadata(name.lower()) for name in found if name]

    def listScopes(self) -> Scopes:
        """Return the scopes that variables hold, in lower case."""
        parts = (name.removeprefix(_PREFIX).partition(_BETWEEN) for name in os.environ if name.startswith(_PREFIX))
        return [SecretScope(name) for name in sorted({scope.lower() for scope, _, key in parts if key})]


def variable_of(scope: str, key: str) -> str:
    """Return the name of the environment variable for a secret."""
    return f"{_PREFIX}{_word(scope)}{_BETWEEN}{_word(key)}"


def _word(text: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", text.upper())


def _from_keyring(scope: str, key: str) -> str | None:
    if importlib.util.find_spec("keyring") is None:
        return None
    keyring: Any = importlib.import_module("keyring")
    try:
        return keyring.get_password(scope, key)
    except keyring.errors.KeyringError as error:
        # a locked keyring, or none on this machine
        raise UsageError(f"the keyring can't be read: {error}. Set {variable_of(scope, key)} instead.") from None
