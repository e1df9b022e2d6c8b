"""A team's server on this machine, for tests: the files of `rlhf scaffold server`, as an administrator fills them in.

Commands and variables are those of the systemd units. What differs belongs to the machine: folders, ports, names.
"""

import grp
import os
import pwd
import re
import secrets
import shlex
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from dotenv import dotenv_values

from pipelines.cli.main import main
from rlhf_core.runtime.cluster import free_port
from tests.support.forks import soon

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SERVICE_USER = 12003
CADDYFILE = "{{\nadmin off\nskip_install_trust\nauto_https disable_redirects\n}}\nimport {etc}/Caddyfile\n"
"""Settings without which Caddy takes port 80 and adds to this machine's authorities; what is imported is as written."""


def program(name: str) -> str:
    """Return the path of a program, also of Debian's PostgreSQL; skip the test where it is not installed."""
    debian = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)
    found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", *debian]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


class Users:
    """Start processes as other Unix users, where that is permitted; otherwise as this one."""

    def __init__(self, folder: Path) -> None:
        self._reach = _reaching_this_python(folder)
        trial = [*self._prefix(SERVICE_USER, ()), sys.executable, "-c", "import encodings"]
        self.apart = os.geteuid() == 0 and subprocess.run(trial, capture_output=True, check=False).returncode == 0
        self.group = grp.getgrnam("daemon") if self.apart else grp.getgrgid(os.getgid())  # of every Unix
        """The group that the members of the team have in common."""

    def start(self, command: Sequence[str], user: int, *groups: int, **options: Any) -> subprocess.Popen[str]:
        """Start a command as a user, with a umask that keeps everybody else out."""
        prefix = self._prefix(user, groups) if self.apart else []
        return subprocess.Popen([*prefix, *command], text=True, umask=0o077, **options)

    def give(self, user: int, *paths: Path) -> None:
        """Make a user the owner of files or folders."""
        for path in paths if self.apart else ():
            os.chown(path, user, user)

    def _prefix(self, user: int, groups: Sequence[int]) -> list[str]:
        given = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
        return [*self._reach, "setpriv", f"--reuid={user}", f"--regid={user}", given]


def _reaching_this_python(folder: Path) -> list[str]:
    """Return the beginning of a command that sees this Python and this code even if they lie in root's closed home."""
    needed = dict.fromkeys(Path(one).resolve() for one in (sys.base_prefix, sys.prefix, ROOT))
    closed = [above for one in needed for above in reversed(one.parents) if not above.stat().st_mode & 0o001]
    if not closed:
        return []
    seen = {one: folder / str(number) for number, one in enumerate(needed) if closed[0] in one.parents}
    before = [f"mkdir {there} && mount --bind {one} {there}" for one, there in seen.items()]
    after = [f"(umask 022; mkdir -p {one}) && mount --bind {there} {one}" for one, there in seen.items()]
    script = " && ".join(
        [f"mount -t tmpfs tmpfs {folder}", *before, f"mount -t tmpfs -o mode=755 tmpfs {closed[0]}", *after]
    )
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", f'{script} && exec "$@"', "sh"]


@dataclass(frozen=True)
class Person:
    """A member of the team, with a Unix user and a state folder of their own."""

    name: str
    user: int
    home: Path
    exported: Mapping[str, str]
    """What they export: `worker.env` with their name and password, and the authority of the certificates."""
    users: Users

    def types(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `rlhf`, and return when it has ended."""
        login = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name, "PATH": f"{BIN}:/usr/bin:/bin"}
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RLHF_USER": self.name}
        variables = {**login, **ours, "RLHF_HOME": str(self.home / "rlhf"), **self.exported, **changes}
        command = [sys.executable, "-P", "-m", "pipelines.cli.main", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        group = self.users.group.gr_gid
        with self.users.start(command, self.user, group, env=variables, cwd=self.home, **pipes) as process:
            said, complained = process.communicate(timeout=400)
        return subprocess.CompletedProcess(command, process.returncode, said, complained)

    def did(self, *words: str) -> str:
        """Return what a command of `rlhf` prints; fail unless it succeeds."""
        done = self.types(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class TeamServer:
    """PostgreSQL, Prefect, MLflow and Caddy. Their logs are `<name>.log` in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._stack = folder, ExitStack()
        self._etc, self._state, python = (folder / name for name in ("etc", "state", "python"))
        for one in (self._etc, self._state, python):
            one.mkdir()
        self.users = Users(python)
        self._port = {name: free_port() for name in ("postgres", "prefect", "mlflow", "PREFECT_SITE", "MLFLOW_SITE")}
        self.prefect, self.mlflow = (
            f"https://localhost:{self._port[name]}" for name in ("PREFECT_SITE", "MLFLOW_SITE")
        )
        self.authority = folder / "root.crt"
        """Certificate that the administrator hands out."""
        self.password = secrets.token_hex(8)
        """Of the database, and of MLflow's administrator."""
        self._fill_in()

    def _fill_in(self) -> None:
        """Write the files, and put in what belongs to this machine."""
        assert main(["scaffold", "server", "--out", str(self._etc)]) == 0
        changes = {
            "/opt/rlhf/bin": BIN,
            "/etc/rlhf": self._etc,
            "/var/lib/rlhf": self._state,
            ":5432/": f":{self._port['postgres']}/",
            "--port 4200": f"--port {self._port['prefect']}",
            "--port 5000": f"--port {self._port['mlflow']}",
            "prefect.rlhf.example": self.prefect.removeprefix("https://"),
            "mlflow.rlhf.example": self.mlflow.removeprefix("https://"),
            "rlhf:PASSWORD@": f"rlhf:{self.password}@",
            "ADMIN_PASSWORD=\n": f"ADMIN_PASSWORD={self.password}\n",
            "SECRET_KEY=\n": f"SECRET_KEY={self.password}\n",
        }
        for path in self._etc.iterdir():
            if path.name != "Caddyfile":  # it has variables for all of these
                text = path.read_text()
                for before, after in changes.items():
                    text = text.replace(before, str(after))
                path.write_text(text)
        secret = [self._etc / name for name in ("server.env", "worker.env", "mlflow_auth.ini", "users")]
        for path in secret:
            path.touch()
            path.chmod(0o600)
        self.users.give(SERVICE_USER, self._state, *secret[2:])  # the other two are read for it, by systemd

    def person(self, name: str, user: int) -> Person:
        """Return a person whom the administrator lets in at Prefect; `start` comes after it."""
        password, home = secrets.token_hex(8), self.folder / name
        home.mkdir(mode=0o700)
        self.users.give(user, home)
        command = [program("caddy"), "hash-password", "--plaintext", password]
        hashed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        with (self._etc / "users").open("a") as lines:
            lines.write(f"{name} {hashed}")
        given = {
            variable: value.replace("NAME", name).replace("PASSWORD", password)
            for variable, value in _variables(self._etc / "worker.env").items()
        }
        given |= dict.fromkeys(("PREFECT_API_SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(self.authority))
        return Person(name, user, home, given, self.users)

    def start(self) -> None:
        """Start all of it, and return when both pages answer by TLS."""
        self._start_postgres()
        started = {"caddy": self._start_caddy()} | {name: self._start_unit(name) for name in ("prefect", "mlflow")}
        made = self._state / "caddy/pki/authorities/local/root.crt"
        soon(made.exists, within_s=60, every_s=0.1)
        shutil.copyfile(made, self.authority)
        self.authority.chmod(0o644)

        def answer() -> bool:
            ended = [name for name, process in started.items() if process.poll() is not None]
            assert not ended, (self.folder / f"{ended[0]}.log").read_text()
            return all(map(self._answers, (f"{self.prefect}/api/health", self.mlflow)))

        soon(answer, within_s=600, every_s=0.2)

    def _answers(self, url: str) -> bool:
        try:
            return httpx.get(url, verify=self.trust(), trust_env=False).status_code in (200, 401)
        except httpx.TransportError:
            return False

    def trust(self) -> ssl.SSLContext:
        """Return the settings with which this process trusts the certificates."""
        return ssl.create_default_context(cafile=self.authority)

    def stop(self) -> None:
        """End all processes."""
        self._stack.close()

    def _start_postgres(self) -> None:
        owner = pwd.getpwnam("postgres").pw_uid if self.users.apart else os.getuid()
        data, port = self.folder / "postgres", str(self._port["postgres"])
        data.mkdir()
        self.users.give(owner, data)
        local = ["--auth-local=trust", "--auth-host=scram-sha-256"]  # as Debian's, but for `peer`
        assert self._run(owner, program("initdb"), "-D", str(data), "-U", "postgres", *local, "--no-sync") == 0
        options = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": data, "fsync": "off"}
        sets = [f"-c{name}={value}" for name, value in options.items()]
        self._start("postgres", owner, [program("postgres"), "-D", str(data), *sets], {})
        login = {"PGHOST": str(data), "PGPORT": port, "PGUSER": "postgres"}
        soon(lambda: self._run(owner, program("psql"), "-qc", "SELECT 1", **login) == 0, within_s=60, every_s=0.1)
        typed = "".join(re.findall(r"^#   (.*\n)", (self._etc / "server.env").read_text(), flags=re.M))
        assert typed.count("\n") == 2
        twice = f"{self.password}\n" * 2  # for `createuser --pwprompt`
        assert self._run(owner, "sh", "-ec", typed, says=twice, **login) == 0, (
            self.folder / "commands.log"
        ).read_text()

    def _start_caddy(self) -> subprocess.Popen[str]:
        file = self.folder / "Caddyfile"
        file.write_text(CADDYFILE.format(etc=self._etc))
        home = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(self._state))
        variables = {**home, "RLHF_USERS": str(self._etc / "users")}
        for name in ("PREFECT", "MLFLOW"):
            variables[f"{name}_PORT"] = str(self._port[name.lower()])
            variables[f"{name}_SITE"] = f"localhost:{self._port[f'{name}_SITE']}"
        command = [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(file)]
        return self._start("caddy", SERVICE_USER, command, variables)

    def _start_unit(self, name: str) -> subprocess.Popen[str]:
        """Start a service as systemd does: in `/`, with the variables of its unit, here of a user without a home."""
        unit = re.findall(r"^(\w+)=(.*)$", (self._etc / f"rlhf-{name}.service").read_text(), flags=re.M)
        service = dict(unit)
        login = {"HOME": "/nonexistent", "USER": "rlhf", "LOGNAME": "rlhf", "PATH": "/usr/local/bin:/usr/bin:/bin"}
        words = [word for key, value in unit if key == "Environment" for word in shlex.split(value)]
        given = dict(word.split("=", 1) for word in words)
        variables = login | given | _variables(Path(service["EnvironmentFile"]))
        return self._start(name, SERVICE_USER, shlex.split(service["ExecStart"]), variables)

    def _start(self, name: str, user: int, command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = self.users.start(command, user, env=variables, cwd="/", stdout=log, stderr=log)
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.terminate)
        return process

    def _run(self, user: int, *command: str, says: str = "", **variables: str) -> int:
        pipe = subprocess.PIPE
        with (self.folder / "commands.log").open("ab") as log:
            path = {"PATH": f"{Path(program('initdb')).parent}:{os.environ['PATH']}"}
            options: dict[str, Any] = {"env": path | variables, "cwd": "/", "stdout": log, "stderr": log}
            process = self.users.start(command, user, stdin=pipe, start_new_session=True, **options)
        process.communicate(says, timeout=120)
        return process.returncode


def _variables(file: Path) -> dict[str, str]:
    """Return the variables of an environment file, as systemd reads it."""
    found = dotenv_values(stream=StringIO(file.read_text()), interpolate=False)
    return {name: value or "" for name, value in found.items()}


@contextmanager
def team_server() -> Iterator[TeamServer]:
    """Yield a server that is not started yet; skip the test where PostgreSQL or Caddy is not installed."""
    for name in ("initdb", "postgres", "psql", "caddy"):
        program(name)
    folder = Path(tempfile.mkdtemp())  # the folders of pytest are closed to other users
    folder.chmod(0o755)
    server = TeamServer(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)
