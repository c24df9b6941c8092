"""`sgpu pool serve`, `keygen`, `authorize`, `revoke`: serving a pool to other machines."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from sgpu_magic.client.this_machine import own_key_path
from sgpu_magic.config import Settings
from sgpu_magic.errors import PoolError, UsageError
from sgpu_magic.formatting import count_of
from sgpu_magic.pool import clients
from sgpu_magic.pool.serving import CLIENTS, checked_listen, checked_name, served_settings
from sgpu_magic.system.secure_sockets import new_key_pair, read_key_pair, write_key_pair
from sgpu_magic.wire.pool_status import MAX_SOCKET_PATH_BYTES, agent_socket_file

# how long ranks of a served pool wait for a restarted service
_ADOPT_S = 600.0


def serve(settings: Settings, engine: str, listen: str, name: str, *, same_files: bool) -> NoReturn:
    """Replace this process by the pool service.

    Args:
        settings: This user's settings.
        engine: The engine, `local` or `ray`.
        listen: Address to listen on, `tcp://host:port`.
        name: Name of the pool and its directories.
        same_files: The nodes share the clients' files and Pythons, so no environments are built.

    Raises:
        UsageError: An argument is not valid.
        PoolError: The runtime directory's path is too long for sockets.
    """
    listen = checked_listen(listen)
    served = served_settings(settings, checked_name(name))
    if len(os.fsencode(agent_socket_file(served.runtime_path))) > MAX_SOCKET_PATH_BYTES:
        raise PoolError(
            f"the pool {name} can't be served: paths of sockets in {served.runtime_path} are longer than the "
            f"system's limit of {MAX_SOCKET_PATH_BYTES} bytes. Set SGPU_RUNTIME_DIR to a shorter directory."
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
    """Create this user's key pair and return a message with the public key.

    Args:
        force: Replace an existing key.

    Raises:
        UsageError: There is a key already, or it can't be written.
    """
    path = own_key_path()
    pair = new_key_pair()
    if path.exists() and not force:
        raise UsageError(
            f"there is already a key in {path}, with the public half {read_key_pair(path).public}. Pools that list it "
            "would refuse a new one; --force replaces it."
        )
    write_key_pair(path, pair, replace=force)
    return (
        f"your public key: {pair.public}\nSend it to the pool's operator, who admits you with `sgpu pool authorize "
        f"NAME '{pair.public}'`. The secret half stays in {path}, which only you can read."
    )


def authorize(settings: Settings, name: str, who: str, key: str, *, admin: bool) -> str:
    """Authorize a key to use the served pool `name`, which need not be running.

    Raises:
        UsageError: An argument is not valid, or the key is authorized already.
    """
    path = served_settings(settings, checked_name(name)).state_path / CLIENTS
    clients.authorize(path, who, key, admin=admin)
    return f"{who} may use the pool {name}{' and stop the runs of others' if admin else ''} from now on ({path})"


def revoke(settings: Settings, name: str, who: str) -> str:
    """Revoke a user's access to the served pool `name`.

    Raises:
        UsageError: There is no such user.
    """
    path = served_settings(settings, checked_name(name)).state_path / CLIENTS
    keys = clients.revoke(path, who)
    return (
        f"{who} may no longer use the pool {name}: {count_of(keys, 'key')} removed, links are closed within "
        "seconds. Active runs continue; an admin can stop them with `sgpu cancel`."
    )
