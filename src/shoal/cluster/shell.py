"""Shell scripts for one change each, with the check that says whether it is needed. Pure text.

Every script may run again and may be interrupted anywhere. What Shoal is about to make is recorded under
`STATE_DIR` before it is made, files appear whole under their name, and no secret stands in a script.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster.facts import DATABASE, STATE_DIR
from shoal.cluster.render import File

BACKUP = ".before-shoal"
HOSTS = "/etc/hosts"
MARK = "# shoal-cluster"
"""Ends every line of `/etc/hosts` that Shoal wrote."""
OFF = "# shoal-cluster off: "
"""Begins every line of it that Shoal disabled; the original line follows."""
LOOPBACK_NAME = "127[.]0[.]1[.]1"
"""The address that Debian's installer writes for the machine's own name."""


@dataclass(frozen=True)
class Daemon:
    """A daemon: its systemd unit, and how to start it without systemd."""

    name: str
    package: str
    process: str
    pid_file: str
    start: str
    before: str = "true"
    stop_s: int = 120
    is_killed: bool = False
    """Whether it is killed if it still runs `stop_s` after SIGTERM."""


MUNGE = Daemon(
    name="munge",
    package="munge",
    process="munged",
    pid_file="/run/munge/munged.pid",
    start="setpriv --reuid munge --regid munge --init-groups /usr/sbin/munged",
    before="install -d -o munge -g munge -m 0755 /run/munge",
    # It keeps nothing on disk but its key. Two of five once ran on for 120 s after SIGTERM on a busy machine.
    stop_s=10,
    is_killed=True,
)
MARIADB = Daemon(
    name="mariadb",
    package="mariadb-server",
    process="mariadbd",
    pid_file="/run/mysqld/mysqld.pid",
    start="setsid --fork /usr/sbin/mariadbd --user=mysql",
    before="install -d -o mysql -g mysql -m 0755 /run/mysqld",
)
SLURMDBD = Daemon("slurmdbd", "slurmdbd", "slurmdbd", "/run/slurmdbd.pid", "/usr/sbin/slurmdbd")
SLURMCTLD = Daemon("slurmctld", "slurmctld", "slurmctld", "/run/slurmctld.pid", "/usr/sbin/slurmctld")
SLURMD = Daemon(
    name="slurmd",
    package="slurmd",
    process="slurmd",
    pid_file="/run/slurmd.pid",
    start="/usr/sbin/slurmd",
    # A slurmd that could not register sleeps for up to 128 s before it ends. Its jobs do not end with it.
    stop_s=30,
    is_killed=True,
)
DAEMONS = (SLURMD, SLURMCTLD, SLURMDBD, MARIADB, MUNGE)
"""In the order in which they are stopped."""


def append_record(record: str, line: str) -> str:
    """Record a line, once, among what Shoal made on the machine."""
    quoted, place = shlex.quote(line), f"{STATE_DIR}/{record}"
    return f"grep -qxF {quoted} {place} 2>/dev/null || echo {quoted} >>{place}"


def is_claimed(claim: str) -> str:
    return f"""[ "$(cat {STATE_DIR}/cluster 2>/dev/null)" = '{claim}' ]"""


def make_claim(claim: str, init: str) -> str:
    return f"""\
set -eu
install -d -m 0700 {STATE_DIR} {STATE_DIR}/started
echo {init} >{STATE_DIR}/init
echo {claim} >{STATE_DIR}/cluster"""


def removal(path: str) -> tuple[str, str]:
    """Return the check and the change that remove Shoal's file and put the earlier file back, in one move."""
    kept = f"{path}{BACKUP}"
    return (
        f"[ ! -e {kept} ] && [ ! -e {path} ]",
        f"set -eu\nif [ -e {kept} ]; then mv -f {kept} {path}; else rm -f {path}; fi",
    )


def is_written(file: File) -> str:
    kept = file.mode.lstrip("0")
    return f"""\
[ "$(sha256sum <{file.path} 2>/dev/null | cut -d' ' -f1)" = {file.sha256} ] || exit 1
[ "$(stat -c '%a %U:%G' {file.path})" = '{kept} {file.owner}' ]"""


def write(file: File, *, is_foreign: bool) -> str:
    """Return a script that takes the content from standard input and keeps a foreign file beside it.

    The first backup is the one that is restored in the end; later ones are kept under other names.
    """
    backup = f"{file.path}{BACKUP}"
    kept = (
        f"if [ -e {backup} ]; then cp -p --backup=numbered {file.path} {backup}.later\n"
        f"else cp -p {file.path} {backup}.new && mv -n {backup}.new {backup}; fi\n"
        if is_foreign
        else ""
    )
    folder = file.path.rpartition("/")[0]
    return f"""\
set -eu
umask 077
[ -d {folder} ] || install -d -m 0755 {folder}
cat >{file.path}.shoal-new
[ "$(sha256sum <{file.path}.shoal-new | cut -d' ' -f1)" = {file.sha256} ] ||
  {{ rm -f {file.path}.shoal-new; echo 'only a part of it arrived' >&2; exit 1; }}
chown {file.owner} {file.path}.shoal-new
chmod {file.mode} {file.path}.shoal-new
{kept}{append_record("files", f"{file.sha256} {file.path}")}
mv -f {file.path}.shoal-new {file.path}"""


def set_owner_and_mode(file: File) -> str:
    """Return a script that sets owner and mode of a file that another program wrote."""
    return f"set -eu\nchown {file.owner} {file.path}\nchmod {file.mode} {file.path}"


def has_names(lines: Sequence[str]) -> str:
    wanted = shlex.quote("\n".join(f"{line} {MARK}" for line in lines))
    return f"""\
[ "$(grep '{MARK}$' {HOSTS})" = {wanted} ] || exit 1
! grep -q "^{LOOPBACK_NAME}[[:space:]].*\\b$(hostname -s)\\b" {HOSTS}"""


def write_names(lines: Sequence[str]) -> str:
    """Write the cluster's names, and remove the machine's own name from loopback addresses.

    Otherwise a rank that looks up its own name would tell its peers a loopback address, as gloo does.
    """
    wanted = shlex.quote("\n".join(f"{line} {MARK}" for line in lines))
    off = f"s/^{LOOPBACK_NAME}[[:space:]].*\\b'\"$(hostname -s)\"'\\b/{OFF}&/"
    text = f"{{ grep -v '{MARK}$' {HOSTS} | sed '{off}'; printf '%s\\n' {wanted}; }}"
    return f"set -eu\n{append_record('made', 'names')}\n{_replace_hosts(text)}"


def has_no_names() -> str:
    return f"! grep -q -e '{MARK}$' -e '^{OFF}' {HOSTS}"


def remove_names() -> str:
    text = f"{{ grep -v '{MARK}$' {HOSTS} | sed 's/^{OFF}//'; }}"
    return f"set -eu\n{_replace_hosts(text)}"


def _replace_hosts(text: str) -> str:
    # Renamed, so that no process reads half of it. In a container the file is a mount, so it is overwritten.
    return f"""\
cp -p {HOSTS} {HOSTS}.shoal-new
{text} >{HOSTS}.shoal-new
mv -f {HOSTS}.shoal-new {HOSTS} 2>/dev/null || cat {HOSTS}.shoal-new >{HOSTS}
rm -f {HOSTS}.shoal-new"""


def has_folder(path: str, owner: str, mode: str) -> str:
    return f"""[ "$(stat -c '%a %U:%G' {path} 2>/dev/null)" = '{mode.lstrip("0")} {owner}' ]"""


def make_folder(path: str, owner: str, mode: str) -> str:
    user, _, group = owner.partition(":")
    return f"""\
set -eu
[ -d {path} ] || {{ {append_record("made", f"folder {path}")}; }}
install -d -o {user} -g {group} -m {mode} {path}"""


def is_running(service: Daemon, init: str) -> str:
    if init == "systemd":
        return f"systemctl is-active --quiet {service.name}"
    return _is_alive(service, f"$(cat {service.pid_file} 2>/dev/null)")


def _is_alive(service: Daemon, pid: str) -> str:
    # The first process of a container may never reap its children: a zombie does not count as running. The
    # file is read once: a zombie that is reaped between two reads would be one that lives.
    test = f'n == "{service.process}" && s != "Z" && s != "X"'
    program = f"/^Name:/ {{ n = $2 }} /^State:/ {{ s = $2 }} END {{ exit !({test}) }}"
    return f"awk '{program}' /proc/{pid}/status 2>/dev/null"


def _stamp(service: Daemon, digest: str) -> str:
    return f"\"{digest} $(dpkg-query -W -f='${{Version}}' {service.package})\""


def stamp_of(service: Daemon) -> str:
    """Return where the stamp of Shoal's start is recorded. It is emptied when Shoal begins to stop the daemon
    for good.
    """
    return f"{STATE_DIR}/started/{service.name}"


def is_being_stopped(service: Daemon) -> str:
    """Whether Shoal has stopped it, is about to, or never started it."""
    return f"[ ! -s {stamp_of(service)} ]"


def is_started(service: Daemon, init: str, digest: str) -> str:
    """Whether it runs, was started by Shoal with these files, and is of the installed version."""
    return f"""\
{is_running(service, init)} || exit 1
[ "$(cat {stamp_of(service)} 2>/dev/null)" = {_stamp(service, digest)} ]"""


def start(service: Daemon, init: str, digest: str) -> str:
    """Start it, or restart it with the files as they are now."""
    stamp = stamp_of(service)
    log = f"{stamp}.log"
    if init == "systemd":
        return f"""\
set -eu
systemctl enable --quiet {service.name}
systemctl restart {service.name} && sleep 1 && systemctl is-active --quiet {service.name} ||
  {{ journalctl -u {service.name} -n 10 --no-pager -o cat >&2; exit 1; }}
echo {_stamp(service, digest)} >{stamp}"""
    return f"""\
set -eu
export PATH=$PATH:/usr/sbin:/sbin
{stop(service, init)}
{service.before}
{service.start} </dev/null >{log} 2>&1 || {{ tail -n 10 {log} >&2; exit 1; }}
for i in $(seq 300); do {is_running(service, init)} && break || sleep 0.1; done
{is_running(service, init)} || {{ tail -n 10 {log} >&2; echo '{service.process} did not stay' >&2; exit 1; }}
echo {_stamp(service, digest)} >{stamp}"""


def stop(service: Daemon, init: str) -> str:
    """Stop it and wait until it is gone, with its pid file; do nothing if it does not run.

    A daemon that gave up root cannot remove that file, and Debian's packages take the file for a running
    daemon.
    """
    if init == "systemd":
        return f"systemctl disable --now --quiet {service.name} 2>/dev/null || true\nrm -f {service.pid_file}"
    alive = _is_alive(service, "$pid")
    gone = f"for i in $(seq {service.stop_s}0); do {alive} || break; sleep 0.1; done"
    kill = (
        f'  if {alive}; then kill -KILL "$pid" 2>/dev/null || true; {gone}; fi\n' if service.is_killed else ""
    )
    # What a process waits for in the kernel, or a frozen cgroup, is all that a failed SIGKILL leaves to see.
    state = "$(grep -s '^State:' /proc/$pid/status) in $(cat /proc/$pid/wchan 2>/dev/null)"
    groups = "$(tr '\\n' ' ' 2>/dev/null </proc/$pid/cgroup)"
    # The pid is read once: a daemon that is starting may rewrite its pid file, which is empty meanwhile.
    return f"""\
if {is_running(service, init)}; then
  pid=$(cat {service.pid_file})
  kill "$pid" 2>/dev/null || true
  {gone}
{kill}  if {alive}; then echo "{service.process} ($pid) does not end: {state}, {groups}" >&2; exit 1; fi
fi
rm -f {service.pid_file}"""


def has_database(digest: str) -> str:
    return f"""\
[ "$(cat {STATE_DIR}/started/database 2>/dev/null)" = {digest} ] || exit 1
mariadb -N -e 'show databases' | grep -qx {DATABASE}"""


def make_database(digest: str) -> str:
    """Read SQL from standard input when the server answers. Leave alone a database that Shoal did not
    make.
    """
    return f"""\
set -eu
for i in $(seq 300); do mariadb -e 'select 1' >/dev/null 2>&1 && break || sleep 0.2; done
there=$(mariadb -N -e "show databases like '{DATABASE}'")
[ -z "$there" ] || grep -qx database {STATE_DIR}/made 2>/dev/null ||
  {{ echo 'a database {DATABASE} was there before Shoal; rename it' >&2; exit 1; }}
{append_record("made", "database")}
mariadb
echo {digest} >{STATE_DIR}/started/database"""


def has_no_database() -> str:
    shown = f"mariadb -N -e 'show databases' 2>/dev/null | grep -qx {DATABASE}"
    return f"[ ! -d /var/lib/mysql/{DATABASE} ] && ! {shown}"


def is_registered(cluster: str) -> str:
    return f"sacctmgr -n -P show cluster format=cluster 2>/dev/null | grep -qx {cluster}"


def register(cluster: str) -> str:
    return f"""\
for i in $(seq 100); do sacctmgr -n show cluster >/dev/null 2>&1 && break || sleep 0.3; done
{is_registered(cluster)} || sacctmgr -i add cluster {cluster} 2>&1 >/dev/null | tail -n 3 >&2
{is_registered(cluster)}"""


def is_node_ready(node: str) -> str:
    """Whether the controller counts on the node: its state has none of the words that mean trouble."""
    return f"""\
state=$(scontrol show node {node} 2>/dev/null | sed -n 's/^ *State=\\([^ ]*\\).*/\\1/p')
case $state in *DOWN*|*DRAIN*|*NOT_RESPONDING*|*UNKNOWN*|*'*'*|'') exit 1 ;; *) exit 0 ;; esac"""


def await_node_ready(node: str, patience_s: int) -> str:
    return f"""\
for i in $(seq {patience_s}); do ({is_node_ready(node)}) && exit 0; sleep 1; done
scontrol show node {node} | grep -E 'State=|Reason=' | sed 's/^ *//' >&2
exit 1"""
