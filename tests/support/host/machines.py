"""Machines on one machine: each with a network, mounts, processes and a hostname of its own, and a real sshd.

A machine's file system is this one's, or one below a folder, with a layer of memory over it (overlayfs), so
that what is written there is nobody else's; a bridge joins them. Needs root. All ends with the `with` block.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.host.lab_locks import LabLock, take_number

PROGRAMS = (
    "sshd",
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "munged",
    "mariadbd",
    "sudo",
    "ip",
    "nsenter",
    "unshare",
)
BOOT_S = 60.0

BOOT = """\
set -eu
dir=$1 name=$2 base=$3
mount --make-rprivate /
mount -t tmpfs tmpfs "$dir"
mkdir "$dir/upper" "$dir/work" "$dir/root"
mount -t overlay overlay -o "lowerdir=$base,upperdir=$dir/upper,workdir=$dir/work" "$dir/root"
root=$dir/root
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "$root/dev/${device%:*}" c 1 "${device#*:}"
done
mknod -m 666 "$root/dev/tty" c 5 0
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for n in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${n%:*}" "$root/dev/${n#*:}"; done
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
# Nothing of this machine's root: what its shell does at login is not what a bare machine's does.
mount -t tmpfs -o mode=700 tmpfs "$root/root"
mkdir "$root/run/sshd" "$root/run/lock"
# What all machines share, as a mount from a file server would.
mkdir -p "$root/srv/shared"
mount --bind "$dir.shared" "$root/srv/shared"
hostname "$name"
cp -r "$dir.keys" "$root/run/keys"
# From here on inside: a link under $root, followed from outside, would lead to this machine's own files.
chroot "$root" sh -eu <<'INSIDE'
printf '127.0.0.1 localhost\\n' >/etc/hosts
printf '127.0.1.1 %s\\n' "$(hostname)" >>/etc/hosts # as Debian's installer leaves it
rm -rf /etc/slurm /etc/munge/munge.key /var/lib/shoal-cluster /var/log/slurm /var/spool/slurmctld \\
  /var/spool/slurmd /etc/mysql/mariadb.conf.d/60-shoal-slurm.cnf /usr/local/lib/shoal-node*
. /run/keys/before
INSIDE
exec chroot "$root" /usr/sbin/sshd -D -e -f /run/keys/sshd_config
"""

SSHD = """\
Port 22
HostKey /run/keys/host_key
AuthorizedKeysFile /run/keys/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
"""


def missing_programs() -> str:
    """Why machines cannot be made here, or nothing."""
    if os.geteuid() != 0:
        return "needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    gone = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"needs {', '.join(gone)}: scripts/setup engines" if gone else ""


@dataclass
class MachineLab:
    """A bridge and the machines on it."""

    folder: Path
    lab_lock: LabLock
    machines: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    plugged: set[str] = field(default_factory=set)

    @property
    def bridge(self) -> str:
        return self.lab_lock.tag

    @property
    def identity(self) -> Path:
        return self.folder / "id"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def shared(self) -> Path:
        """Below `/srv/shared` on every machine; anybody may write there."""
        return self.folder / "shared"

    @property
    def gateway(self) -> str:
        """This machine's own address there."""
        return f"{_net(self.lab_lock.number)}.1"

    def address(self, name: str) -> str:
        return f"{_net(self.lab_lock.number)}.{10 + ord(name[-1]) - ord('a')}"

    def start(self, name: str, setup_script: str = "true", base: Path = Path("/")) -> None:
        """Start a machine. `before` is shell that runs inside, just before its sshd; `base` is what is
        installed there, if not what is installed here.
        """
        keys = self.folder / f"{name}.keys"
        keys.mkdir()
        (self.folder / f"{name}.shared").symlink_to(self.shared)
        (self.folder / name).mkdir()
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "host_key")
        shutil.copy(self.folder / "id.pub", keys / "authorized_keys")
        (keys / "sshd_config").write_text(SSHD)
        (keys / "before").write_text(textwrap.dedent(setup_script))
        public = (keys / "host_key.pub").read_text().split()
        with self.known_hosts.open("a") as known:
            known.write(f"{self.address(name)} {public[0]} {public[1]}\n")
        self._plug_in(name)
        with (self.folder / f"{name}.log").open("wb") as log:
            command = ["nsenter", f"--net=/run/netns/{self._netns(name)}"]
            command += ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
            command += ["sh", "-c", BOOT, "boot", str(self.folder / name), name, str(base)]
            self.machines[name] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._wait(name)

    def _plug_in(self, name: str) -> None:
        netns, plug = self._netns(name), f"{self.bridge}{name[-1]}"
        _call("ip", "netns", "add", netns)
        self.plugged.add(name)
        _call("ip", "link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", netns)
        _call("ip", "link", "set", plug, "master", self.bridge, "up")
        _call("ip", "-n", netns, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _call("ip", "-n", netns, "link", "set", "eth0", "up")
        _call("ip", "-n", netns, "link", "set", "lo", "up")

    def _netns(self, name: str) -> str:
        return f"{self.bridge}-{name}"

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + BOOT_S
        while self.ssh(name, "true", check=False).returncode != 0:
            told = (self.folder / f"{name}.log").read_text()
            assert self.machines[name].poll() is None, told
            assert time.monotonic() < deadline, told
            time.sleep(0.1)

    def ssh(self, name: str, command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command there as an ordinary SSH client would."""
        options = [f"UserKnownHostsFile={self.known_hosts}", "ConnectTimeout=60", "BatchMode=yes"]
        flags = [word for option in options for word in ("-o", option)]
        done = subprocess.run(
            ["ssh", *flags, "-i", str(self.identity), f"root@{self.address(name)}", command],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if check:
            assert done.returncode == 0, f"{name}: {command}: {done.stdout}{done.stderr}"
        return done

    def stop(self, name: str) -> None:
        """Pull the plug: every process of the machine dies with the first."""
        machine = self.machines.pop(name)
        machine.send_signal(signal.SIGKILL)
        machine.wait()
        self.unplug(name)
        _sweep(name)

    def unplug(self, name: str) -> None:
        self.plugged.remove(name)
        _call("ip", "netns", "del", self._netns(name))


def _sweep(name: str) -> None:
    """The cgroups that slurmd made for this node: the kernel is the one thing machines here share."""
    for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{name}"):
        for path in (*sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True), top):
            with suppress(OSError):  # a process in it is still on its way out
                path.rmdir()


def _net(number: int) -> str:
    """What all its addresses begin with."""
    return f"10.217.{number}"


def _call(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[MachineLab]:
    """A lab with these machines; each name ends in a letter of its own."""
    lab = MachineLab(folder, take_number("m", _net))
    folder.mkdir(parents=True, exist_ok=True)
    lab.shared.mkdir()
    lab.shared.chmod(0o1777)
    _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", lab.identity)
    lab.known_hosts.touch()
    _call("ip", "link", "add", lab.bridge, "type", "bridge")
    try:
        _call("ip", "addr", "add", f"{lab.gateway}/24", "dev", lab.bridge)
        _call("ip", "link", "set", lab.bridge, "up")
        for name in names:
            lab.start(name)
        yield lab
    finally:
        for name in list(lab.machines):
            lab.stop(name)
        for name in list(lab.plugged):
            lab.unplug(name)
        _call("ip", "link", "del", lab.bridge)
        lab.lab_lock.release()
