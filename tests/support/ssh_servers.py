"""Real servers of Debian's OpenSSH on loopback, each with its own keys, configuration and home directory behind it."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from free_ports import free_port
from homes import Home
from kernels import Kernel
from waiting import eventually

from sgpu_magic.client.pools_file import PoolEntry, add_pool

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="OpenSSH's client and server are not installed"
)
_START_S = 10
_CONFIG = """
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
PrintLastLog no
LogLevel VERBOSE
{environment}
{more}
"""


class SshServer:
    """A machine behind ssh: a server, and the home that a login there has.

    Args:
        folder: An empty folder for keys and configuration.
        home: The home behind it: a pool there has its directories.
        path: The `PATH` of logins.
        more: Further lines of the server's configuration.
        environment: Further variables of logins.
        user: Who logs in; this user if it is None.
        wrapper: A command that runs the server, such as `ip netns exec NAME`.
        address: Where it listens.

    Attributes:
        port: Where it listens.
        far: The home behind it.
        user_home: The home directory of logins.
        log: The file to which it logs.
    """

    def __init__(
        self,
        folder: Path,
        home: Home,
        *,
        path: str,
        more: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        wrapper: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.far = folder, home
        self.port = free_port()
        self.log = folder / "sshd.log"
        self.address = address
        self.user = user or pwd.getpwuid(os.getuid()).pw_name
        self._wrapper = wrapper
        for name in ("host_key", "client_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True
            )
        shutil.copy(folder / "client_key.pub", folder / "authorized_keys")
        variables = environment or {}
        self.user_home = Path(variables.get("HOME", home.path / "home"))
        self.user_home.mkdir(exist_ok=True)
        own = {name: value for name, value in home.environ.items() if name.startswith("SGPU_")}
        variables = {
            "HOME": str(self.user_home),
            "PATH": path,
            "TMPDIR": home.environ["TMPDIR"],
            **_of_installers(),
            **own,
            **variables,
        }
        # sshd takes the first line of a name only
        set_env = "SetEnv " + " ".join(f'"{name}={value}"' for name, value in variables.items())
        text = _CONFIG.format(address=address, port=self.port, folder=folder, environment=set_env, more="\n".join(more))
        (folder / "sshd_config").write_text(text)
        self.trust()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def trust(self, key: str = "host_key.pub") -> None:
        """Make this server's key the known one, or that of another file."""
        words = (self.folder / key).read_text().split()[:2]
        (self.folder / "known_hosts").write_text(f"[{self.address}]:{self.port} {' '.join(words)}\n")

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        # of Debian's service, which makes it at boot
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        command = [*self._wrapper, str(SSHD), "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.log)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        eventually(
            lambda: "listening" in self.log.read_text() if self.log.exists() else False, _START_S, "sshd listens"
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Stop the server; logins go on."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(10)

    # ------------------------------------------------------------ the user's side

    def configure(self, host: str, *more: str, port: int = 0) -> str:
        """Write the user's ssh configuration with this server as `host`, and return the ssh command that uses it.

        Args:
            host: The name of the `Host`.
            more: Further lines of it.
            port: Where ssh connects to on this machine; 0 for the server's port.
        """
        config = self.folder / "ssh_config"
        config.write_text(self.host_lines(host, *more, port=port))
        return f"ssh -F {shlex.quote(str(config))}"

    def host_lines(self, host: str, *more: str, port: int = 0) -> str:
        """Return the lines of a `Host`; arguments as in `configure`."""
        lines = (
            f"Host {host}",
            f"  HostName {self.address}",
            f"  Port {port or self.port}",
            f"  User {self.user}",
            f"  IdentityFile {self.folder}/client_key",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.folder}/known_hosts",
            "  GlobalKnownHostsFile /dev/null",
            *(f"  {line}" for line in more),
        )
        return "\n".join(lines) + "\n"

    def list_for(
        self,
        home: Home,
        name: str,
        *more: str,
        port: int = 0,
        python: str = "",
        prologue: str = "",
        wheels: str = "",
        same_files: bool = True,
    ) -> None:
        """List this machine as a pool of a user.

        Args:
            home: The user's home.
            name: The pool's name, and that of the `Host`.
            more: As in `configure`.
            port: As in `configure`.
            python: As in `PoolEntry`.
            prologue: As in `PoolEntry`.
            wheels: As in `PoolEntry`.
            same_files: As in `PoolEntry`.
        """
        home.environ["SGPU_POOLS_FILE"] = str(home.path / "pools.toml")
        home.environ["SGPU_SSH_COMMAND"] = self.configure(name, *more, port=port)
        entry = PoolEntry(
            name, f"ssh://{name}", "", python=python, prologue=prologue, wheels=wheels, same_files=same_files
        )
        add_pool(entry, home.path / "pools.toml", replace=True)


def _of_installers() -> Mapping[str, str]:
    """Return this machine's variables for pip and uv, whose cache is shared."""
    begins = ("PIP_", "UV_", "SSL_", "REQUESTS_CA_", "CURL_CA_")
    found = {name: value for name, value in os.environ.items() if name.startswith(begins)}
    return {"UV_CACHE_DIR": str(Path.home() / ".cache/uv"), **found}


# of the machines' logins: the Python of the tests, whose environment has torch
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
STRICT = ("AllowTcpForwarding no", "AllowStreamLocalForwarding no", "MaxSessions 1", "PermitTTY no")
"""What a careful administrator forbids."""


class SshMachines:
    """Several machines, of which the first can log in to the others, listed as one pool `lab` of a user.

    Args:
        folder: An empty folder for keys and configuration.
        homes: The homes behind them.
        user: The user's home.
        variables: Further variables of logins, for each machine.
        same_files: As in `PoolEntry`.

    Attributes:
        user: As given.
        servers: The machines, `node0`, `node1` ...
        entry: The pool's entry.
    """

    def __init__(
        self,
        folder: Path,
        homes: Sequence[Home],
        user: Home,
        *,
        variables: Sequence[Mapping[str, str]] | None = None,
        same_files: bool = True,
    ) -> None:
        self.user = user
        folder.mkdir(parents=True, exist_ok=True)
        known, config = folder / "known_hosts", folder / "config_there"
        environment = {"SGPU_SSH_COMMAND": f"ssh -F {shlex.quote(str(config))}"}
        self.servers = [
            SshServer(folder / f"node{number}", home, path=PATH, more=STRICT, environment={**environment, **own})
            for number, (home, own) in enumerate(zip(homes, variables or [{}] * len(homes), strict=True))
        ]
        known.write_text("".join((server.folder / "known_hosts").read_text() for server in self.servers))
        # the first machine gets the others by address, as this user's configuration has them
        lines = ["Host 127.0.0.1", f"  UserKnownHostsFile {known}", "  GlobalKnownHostsFile /dev/null"]
        lines += ["  IdentitiesOnly yes", *(f"  IdentityFile {server.folder}/client_key" for server in self.servers)]
        config.write_text("\n".join(lines) + "\n")
        here = folder / "config_here"
        here.write_text("".join(server.host_lines(f"node{number}") for number, server in enumerate(self.servers)))
        user.environ["SGPU_POOLS_FILE"] = str(user.path / "pools.toml")
        user.environ["SGPU_SSH_COMMAND"] = f"ssh -F {shlex.quote(str(here))}"
        names = ",".join(f"node{number}" for number in range(len(homes)))
        self.entry = PoolEntry("lab", f"ssh://{names}", "", same_files=same_files)
        add_pool(self.entry, user.path / "pools.toml", replace=True)

    def stop(self) -> None:
        """Stop the servers; logins go on."""
        for server in self.servers:
            server.stop()


def logins(kernel: Kernel) -> list[psutil.Process]:
    """Return the ssh processes of a kernel."""
    return [child for child in psutil.Process(kernel.pid).children() if child.name() == "ssh"]


def sgpu(home: Home, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command of a user."""
    command = [sys.executable, "-m", "sgpu_magic.cli", *words]
    return subprocess.run(command, env=home.environ, capture_output=True, text=True, timeout=timeout_s, cwd=home.work)
