"""Real servers of Debian's OpenSSH on loopback, each with its own keys, configuration and home directory behind it."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from free_ports import free_port
from homes import Home
from waiting import eventually

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="OpenSSH's client and server are not installed"
)
_START_S = 10
_CONFIG = """
ListenAddress 127.0.0.1
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

    Attributes:
        port: Where it listens.
        far: The home behind it.
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
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.far = folder, home
        self.port = free_port()
        self.log = folder / "sshd.log"
        self.user = pwd.getpwuid(os.getuid()).pw_name
        for name in ("host_key", "client_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True
            )
        shutil.copy(folder / "client_key.pub", folder / "authorized_keys")
        user_home = home.path / "home"
        user_home.mkdir(exist_ok=True)
        self.user_home = user_home
        own = {name: value for name, value in home.environ.items() if name.startswith("SGPU_")}
        variables = {
            "HOME": str(user_home),
            "PATH": path,
            "TMPDIR": home.environ["TMPDIR"],
            **own,
            **(environment or {}),
        }
        # sshd takes the first line of a name only
        set_env = "SetEnv " + " ".join(f'"{name}={value}"' for name, value in variables.items())
        text = _CONFIG.format(port=self.port, folder=folder, environment=set_env, more="\n".join(more))
        (folder / "sshd_config").write_text(text)
        self.trust()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def trust(self, key: str = "host_key.pub") -> None:
        """Make this server's key the known one, or that of another file."""
        words = (self.folder / key).read_text().split()[:2]
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {' '.join(words)}\n")

    def start(self) -> None:
        """Start the server, and wait until it listens."""
        # of Debian's service, which makes it at boot
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        command = [str(SSHD), "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.log)]
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

    def configure(self, host: str, *more: str) -> str:
        """Write the user's ssh configuration with this server as `host`, and return the ssh command that uses it."""
        lines = (
            f"Host {host}",
            "  HostName 127.0.0.1",
            f"  Port {self.port}",
            f"  User {self.user}",
            f"  IdentityFile {self.folder}/client_key",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.folder}/known_hosts",
            "  GlobalKnownHostsFile /dev/null",
            *(f"  {line}" for line in more),
        )
        config = self.folder / "ssh_config"
        config.write_text("\n".join(lines) + "\n")
        return f"ssh -F {shlex.quote(str(config))}"
