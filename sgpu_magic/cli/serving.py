"""`sgpu pool serve`, `keygen`, `authorize` and `revoke`: a pool for other machines, and who may use it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from sgpu_magic.cli import deploying
from sgpu_magic.client.keys import own_key_path
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.pool import clients
from sgpu_magic.pool.serving import CLIENTS, checked_listen, checked_name, served_settings
from sgpu_magic.system.secure_sockets import new_key_pair, write_key_pair
from sgpu_magic.wire.address import MAX_SOCKET_PATH_BYTES, agent_socket_file

# ranks of a served pool wait so long for the next service
_ADOPT_S = 600.0


def run(settings: Settings, options: argparse.Namespace) -> str:
    """Do what was asked, and return what to print; `serve` does not come back."""
    match options.action:
        case "serve":
            serve(settings, options.engine, options.listen, options.name, same_files=options.same_files)
        case "deploy" | "undeploy":
            return deploying.run(settings, options)
        case "keygen":
            return keygen(force=options.force)
        case "authorize":
            return authorize(settings, options.name, options.who, options.key, admin=options.admin)
        case _:
            return revoke(settings, options.name, options.who)


def serve(settings: Settings, engine: str, listen: str, name: str, *, same_files: bool) -> NoReturn:
    """Become the pool.

    Args:
        settings: This user's.
        engine: Where its ranks run.
        listen: `tcp://host:port`.
        name: Its name, and that of its directories.
        same_files: Its nodes see the clients' files and run the same Pythons: no environment is built.

    Raises:
        UsageError: One of them means nothing.
    """
    listen = checked_listen(listen)
    served = served_settings(settings, checked_name(name))
    if len(os.fsencode(agent_socket_file(served.runtime_path))) > MAX_SOCKET_PATH_BYTES:
        raise PoolError(
            f"the pool {name} can't be served: paths of sockets in {served.runtime_path} are longer than the system's "
            f"{MAX_SOCKET_PATH_BYTES} bytes. Set SGPU_RUNTIME_DIR to a shorter directory."
        )
    variables = {
        "SGPU_STATE_DIR": served.state_dir,
        "SGPU_RUNTIME_DIR": served.runtime_dir,
        "SGPU_POOL": name,
        "SGPU_LISTEN": listen,
        "PYTHONSAFEPATH": "1",
    }
    if settings.adopt_timeout_s == Settings().adopt_timeout_s:
        variables["SGPU_ADOPT_TIMEOUT_S"] = str(_ADOPT_S)
    variables |= {"SGPU_RAY_SAME_FILES": "1"} if same_files else {"SGPU_ENVIRONMENTS": "built"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "sgpu_magic.pool.serving", engine], {**os.environ, **variables})


def keygen(*, force: bool) -> str:
    """Make this user's key.

    Args:
        force: In place of the one that there is.

    Raises:
        UsageError: There is one, or it can't be written.
    """
    path = own_key_path()
    pair = new_key_pair()
    if path.exists() and not force:
        raise UsageError(
            f"there is a key in {path} already; pools that know it would not know a new one. --force replaces it."
        )
    write_key_pair(path, pair, replace=force)
    return (
        f"your public key: {pair.public}\nSend it to who runs the pool; they let you in with `sgpu pool authorize "
        f"NAME '{pair.public}'`. The secret half stays in {path}, and nobody but you may read it."
    )


def authorize(settings: Settings, name: str, who: str, key: str, *, admin: bool) -> str:
    """Let a key into the served pool `name`, which need not run.

    Raises:
        UsageError: One of them means nothing, or the key is listed already.
    """
    path = served_settings(settings, checked_name(name)).state_path / CLIENTS
    clients.authorize(path, who, key, admin=admin)
    return f"{who} may use the pool {name}{' and end what others run there' if admin else ''}, from now on ({path})"


def revoke(settings: Settings, name: str, who: str) -> str:
    """Let a user into the served pool `name` no longer.

    Raises:
        UsageError: There is no such user.
    """
    path = served_settings(settings, checked_name(name)).state_path / CLIENTS
    keys = clients.revoke(path, who)
    return (
        f"{who} may no longer use the pool {name}: {keys} key{'s' * (keys != 1)} removed, links are cut within "
        "seconds. Runs that go on are not ended; an admin's `sgpu cancel` does that."
    )
