"""Machines for tests: network namespaces with an ssh daemon, an address, a home and folders of their own each.

One namespace is the machine of the launcher; a bridge in it joins all others. Nothing outside these namespaces is
changed, but for folders that are mounted over inside them. A machine's processes are found by their network namespace,
however they were started, so a test can say that none is left.

Root, the tools of `TOOLS` and the system's permission to make namespaces are needed; `obstacle` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
TOOLS = ("ip", "unshare", "mount", "ssh", "ssh-keygen", "rsync")
NETWORK = "10.177.0"
LAUNCHER_ADDRESS = f"{NETWORK}.1"
UP_S = 60.0
GONE_S = 15.0
"""Nothing of a job may be left on any machine so long after its launcher has ended, or was killed. That takes 3 s, and
silence alone would take an agent 20 s to notice."""

USER_HOME = os.path.expanduser("~root")
ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])

SSHD_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PrintMotd no
AcceptEnv none
SetEnv PYTHONPATH={pythonpath} TMPDIR={folder}/tmp XDG_RUNTIME_DIR={folder}/tmp
LogLevel VERBOSE
"""

SSH_CONFIG = """\
Host {name}
    HostName {address}
    Port {port}
    User root
    IdentityFile {key}
    IdentitiesOnly yes
    UserKnownHostsFile {known_hosts}
"""


def obstacle() -> str:
    """Why machines cannot be made here; '' if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not Path(SSHD).exists():
        missing.append("sshd")
    if missing:
        return f"{', '.join(missing)} are missing (Debian: openssh-server, openssh-client, rsync, iproute2, util-linux)"
    tried = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"namespaces are not permitted here: {tried.stderr.decode().strip()}"


@dataclass
class Machine:
    """One host: its namespace, its daemon, and where its files lie as seen from outside.

    Attributes:
        name: what ssh calls it.
        namespace: of its network.
        folder: everything it has of its own, among it its view of the shared destination.
    """

    name: str
    namespace: str
    address: str
    folder: Path
    port: int = 22
    daemon: subprocess.Popen[bytes] | None = None

    @property
    def destination(self) -> Path:
        """What this machine has where the shared destination is."""
        return self.folder / "destination"

    def processes(self) -> dict[int, str]:
        """Process id → command line of all that runs on this machine, the ssh daemon's apart."""
        inode = os.stat(f"/run/netns/{self.namespace}").st_ino
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/net").st_ino == inode:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line and not line.startswith("sshd") and SSHD not in line:
                        found[int(entry.name)] = line
        return found

    def files(self) -> list[str]:
        """Files of kvdist that lie in this machine's folder for temporary ones."""
        return sorted(str(path) for path in (self.folder / "tmp").glob("kvdist*"))

    def run(self, *words: str, check: bool = True) -> None:
        """Run a command as a process of this machine would be: with its network and its mounts."""
        assert self.daemon is not None
        inside = ["nsenter", "--target", str(self.daemon.pid), "--net", "--mount", *words]
        subprocess.run(inside, check=check, capture_output=True)

    def set_link(self, up: bool) -> None:
        """Plug the machine's network cable in, or pull it out."""
        ip("-n", self.namespace, "link", "set", "eth0", "up" if up else "down")


@dataclass
class Machines:
    """All machines of one test, and the launcher's.

    Attributes:
        destination: a folder that exists everywhere and is another one on every machine.
        home: the launching user's home.
    """

    folder: Path
    namespace: str
    destination: Path
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def left_after(self, within_s: float) -> list[str]:
        """What is left so long from now on any machine but the launcher's: command lines of processes, and files."""
        deadline = time.monotonic() + within_s
        while left := [line for one in self.machines.values() for line in (*one.processes().values(), *one.files())]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.05)  # they are nobody's children here, so their end cannot be waited for
        return []

    def command(self, words: Sequence[str]) -> list[str]:
        """Words that run a command on the launcher's machine, with its own ssh configuration."""
        inside = f'{_mounts(self.home, self.folder / "launcher-destination", self.destination)} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "-m", "sh", "-c", inside, "sh", *words]

    def write_ssh_config(self, *names: str) -> None:
        """Let the launching user's ssh know these machines, and their keys."""
        chosen = [self.machines[name] for name in names or self.machines]
        ssh = self.home / ".ssh"
        texts = [
            SSH_CONFIG.format(
                name=one.name, address=one.address, port=one.port, key=ssh / "key", known_hosts=ssh / "known_hosts"
            ).replace(str(self.home), USER_HOME)
            for one in chosen
        ]
        (ssh / "config").write_text("\n".join(texts))
        keys = [f"{one.address} {(one.folder / 'host_key.pub').read_text().rsplit(' ', 1)[0]}\n" for one in chosen]
        (ssh / "known_hosts").write_text("".join(keys))


@contextlib.contextmanager
def running(folder: Path, names: Sequence[str]) -> Iterator[Machines]:
    """Machines of these names, up and reachable.

    Args:
        folder: an empty folder; its path has no blanks.
        names: of the machines besides the launcher's.
    """
    tag = f"kv{os.getpid() % 100000}"
    destination = Path(f"/srv/kvdist-{tag}")
    machines = Machines(folder, f"{tag}-launcher", destination)
    try:
        destination.mkdir(parents=True)
        _make_home(machines)
        _make_launcher(machines)
        for number, name in enumerate(names, 2):
            machine = Machine(name, f"{tag}-{name}", f"{NETWORK}.{number}", folder / name)
            machines.machines[name] = machine
            _connect(machines, machine, number)
            _start_daemon(machines, machine)
        machines.write_ssh_config()
        for machine in machines.machines.values():
            _await_daemon(machine)
        yield machines
    finally:
        _remove(machines)


def ip(*words: str) -> None:
    """Run iproute2's tool."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _mounts(home: Path, own: Path, destination: Path) -> str:
    """Shell commands that give a machine its own home and destination.

    The home lies over that of the user, which may hold the interpreter. Where file systems cannot be laid over each
    other, only what ssh keeps there is the machine's own.
    """
    over = f"lowerdir={USER_HOME},upperdir={home},workdir={home}.work"
    return (
        "mount --make-rprivate /"
        f" && {{ mount -t overlay overlay -o {over} {USER_HOME} || mount --bind {home}/.ssh {USER_HOME}/.ssh; }}"
        f" && mount --bind {own} {destination}"
    )


def _make_home(machines: Machines) -> None:
    ssh = machines.home / ".ssh"
    ssh.mkdir(parents=True, mode=0o700)
    machines.home.with_name("home.work").mkdir()
    (machines.folder / "launcher-destination").mkdir()
    _make_key(ssh / "key")


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, capture_output=True)


def _make_launcher(machines: Machines) -> None:
    name = machines.namespace
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "add", "br0", "type", "bridge")
    ip("-n", name, "addr", "add", f"{LAUNCHER_ADDRESS}/24", "dev", "br0")
    ip("-n", name, "link", "set", "br0", "up")


def _connect(machines: Machines, machine: Machine, number: int) -> None:
    """A cable from the machine to the bridge."""
    ip("netns", "add", machine.namespace)
    port = f"port{number}"
    far_end = ("peer", "name", "eth0", "netns", machine.namespace)
    ip("-n", machines.namespace, "link", "add", port, "type", "veth", *far_end)
    ip("-n", machines.namespace, "link", "set", port, "master", "br0")
    ip("-n", machines.namespace, "link", "set", port, "up")
    ip("-n", machine.namespace, "link", "set", "lo", "up")
    ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
    ip("-n", machine.namespace, "link", "set", "eth0", "up")


def _start_daemon(machines: Machines, machine: Machine) -> None:
    for name in ("home/.ssh", "home.work", "destination", "tmp"):
        (machine.folder / name).mkdir(parents=True)
    _make_key(machine.folder / "host_key")
    shutil.copy(machines.home / ".ssh/key.pub", machine.folder / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    config = machine.folder / "sshd_config"
    config.write_text(
        SSHD_CONFIG.format(address=machine.address, port=machine.port, folder=machine.folder, pythonpath=PYTHONPATH)
    )
    mounts = _mounts(machine.folder / "home", machine.destination, machines.destination)
    inside = f"{mounts} && exec {SSHD} -D -e -f {config}"
    with open(machine.folder / "sshd.log", "wb") as log:
        machine.daemon = subprocess.Popen(
            ["ip", "netns", "exec", machine.namespace, "unshare", "-m", "sh", "-c", inside],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _await_daemon(machine: Machine) -> None:
    log = machine.folder / "sshd.log"
    deadline = time.monotonic() + UP_S
    while "Server listening" not in log.read_text():
        daemon = machine.daemon
        assert daemon is not None
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the ssh daemon of {machine.name} did not come up: {log.read_text()}")
        time.sleep(0.02)  # a file cannot be waited for


def _remove(machines: Machines) -> None:
    for machine in machines.machines.values():
        with contextlib.suppress(FileNotFoundError):
            for pid in machine.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if machine.daemon is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.daemon.pid, signal.SIGKILL)
            machine.daemon.wait()
    for name in [*(one.namespace for one in machines.machines.values()), machines.namespace]:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    with contextlib.suppress(OSError):
        machines.destination.rmdir()
