"""Scripts of `sh` for one change each, with the look that says whether it is needed. Pure text.

Every script may run again, and may be cut off anywhere: what Shoal is about to make is written down under
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
"""Begins every line of it that Shoal put out of use, as it stood there."""
LOOPBACK_NAME = "127[.]0[.]1[.]1"
"""What Debian's installer writes for the machine's own name."""


@dataclass(frozen=True)
class Service:
    """A daemon: as systemd knows it, and how to start it where there is no systemd."""

    name: str
    package: str
    process: str
    pid_file: str
    start: str
    before: str = "true"
    stop_s: int = 120
    is_killed: bool = False
    """Whether it is killed if it still runs `stop_s` after SIGTERM."""


MUNGE = Service(
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
MARIADB = Service(
    name="mariadb",
    package="mariadb-server",
    process="mariadbd",
    pid_file="/run/mysqld/mysqld.pid",
    start="setsid --fork /usr/sbin/mariadbd --user=mysql",
    before="install -d -o mysql -g mysql -m 0755 /run/mysqld",
)
SLURMDBD = Service("slurmdbd", "slurmdbd", "slurmdbd", "/run/slurmdbd.pid", "/usr/sbin/slurmdbd")
SLURMCTLD = Service("slurmctld", "slurmctld", "slurmctld", "/run/slurmctld.pid", "/usr/sbin/slurmctld")
SLURMD = Service(
    name="slurmd",
    package="slurmd",
    process="slurmd",
    pid_file="/run/slurmd.pid",
    start="/usr/sbin/slurmd",
    # One that could not register sleeps for up to 128 s before it ends. Its jobs do not end with it.
    stop_s=30,
    is_killed=True,
)
SERVICES = (SLURMD, SLURMCTLD, SLURMDBD, MARIADB, MUNGE)
"""In the order in which they are stopped."""


def recorded(what: str, line: str) -> str:
    """Write a line down among what Shoal made here, once."""
    quoted, place = shlex.quote(line), f"{STATE_DIR}/{what}"
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
    """The look and the change: Shoal's file goes, and what was there before it is back, in one move."""
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
    """Take the content from standard input; what was there before and is not Shoal's is kept beside it.

    The first of it stays what is put back in the end; what came between is kept under other names.
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
{kept}{recorded("files", f"{file.sha256} {file.path}")}
mv -f {file.path}.shoal-new {file.path}"""


def give(file: File) -> str:
    """The right owner and mode for a file that somebody else wrote."""
    return f"set -eu\nchown {file.owner} {file.path}\nchmod {file.mode} {file.path}"


def has_names(lines: Sequence[str]) -> str:
    wanted = shlex.quote("\n".join(f"{line} {MARK}" for line in lines))
    return f"""\
[ "$(grep '{MARK}$' {HOSTS})" = {wanted} ] || exit 1
! grep -q "^{LOOPBACK_NAME}[[:space:]].*\\b$(hostname -s)\\b" {HOSTS}"""


def write_names(lines: Sequence[str]) -> str:
    """The cluster's names, and the machine's own name no longer at a loopback address.

    A rank that looks its own name up would tell its peers to find it there: gloo does.
    """
    wanted = shlex.quote("\n".join(f"{line} {MARK}" for line in lines))
    off = f"s/^{LOOPBACK_NAME}[[:space:]].*\\b'\"$(hostname -s)\"'\\b/{OFF}&/"
    text = f"{{ grep -v '{MARK}$' {HOSTS} | sed '{off}'; printf '%s\\n' {wanted}; }}"
    return f"set -eu\n{recorded('made', 'names')}\n{_replace_hosts(text)}"


def has_no_names() -> str:
    return f"! grep -q -e '{MARK}$' -e '^{OFF}' {HOSTS}"


def remove_names() -> str:
    text = f"{{ grep -v '{MARK}$' {HOSTS} | sed 's/^{OFF}//'; }}"
    return f"set -eu\n{_replace_hosts(text)}"


def _replace_hosts(text: str) -> str:
    # Renamed, so that nobody reads half of it; in a container it is a mount of its own, and written over.
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
[ -d {path} ] || {{ {recorded("made", f"folder {path}")}; }}
install -d -o {user} -g {group} -m {mode} {path}"""


def is_running(service: Service, init: str) -> str:
    if init == "systemd":
        return f"systemctl is-active --quiet {service.name}"
    return _is_alive(service, f"$(cat {service.pid_file} 2>/dev/null)")


def _is_alive(service: Service, pid: str) -> str:
    # A container's first process may never reap its children: a zombie does not run.
    status = f"/proc/{pid}/status"
    return f"{{ grep -qs '^Name:.{service.process}$' {status} && ! grep -qs '^State:.[ZX]' {status}; }}"


def _stamp(service: Service, digest: str) -> str:
    return f"\"{digest} $(dpkg-query -W -f='${{Version}}' {service.package})\""


def stamp_of(service: Service) -> str:
    """Where it is written down with what Shoal started it. Emptied when Shoal begins to stop it for good."""
    return f"{STATE_DIR}/started/{service.name}"


def is_being_stopped(service: Service) -> str:
    """Whether Shoal has stopped it, or is about to; or never started it."""
    return f"[ ! -s {stamp_of(service)} ]"


def is_started(service: Service, init: str, digest: str) -> str:
    """Whether it runs, was started by Shoal with these files, and is of the version that is installed."""
    return f"""\
{is_running(service, init)} || exit 1
[ "$(cat {stamp_of(service)} 2>/dev/null)" = {_stamp(service, digest)} ]"""


def start(service: Service, init: str, digest: str) -> str:
    """Start it, or start it again with the files as they are now."""
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


def stop(service: Service, init: str) -> str:
    """Stop it and wait until it is gone, with its pid file; nothing if it does not run.

    A daemon that gave up root cannot remove that file, and Debian's packages take it for a daemon that runs.
    """
    if init == "systemd":
        return f"systemctl disable --now --quiet {service.name} 2>/dev/null || true\nrm -f {service.pid_file}"
    alive = _is_alive(service, "$pid")
    gone = f"for i in $(seq {service.stop_s}0); do {alive} || break; sleep 0.1; done"
    kill = (
        f'  if {alive}; then kill -KILL "$pid" 2>/dev/null || true; {gone}; fi\n' if service.is_killed else ""
    )
    # The pid is read once: a daemon that still starts may rewrite its pid file, which is empty meanwhile.
    return f"""\
if {is_running(service, init)}; then
  pid=$(cat {service.pid_file})
  kill "$pid" 2>/dev/null || true
  {gone}
{kill}  if {alive}; then echo '{service.process} does not end' >&2; exit 1; fi
fi
rm -f {service.pid_file}"""


def has_database(digest: str) -> str:
    return f"""\
[ "$(cat {STATE_DIR}/started/database 2>/dev/null)" = {digest} ] || exit 1
mariadb -N -e 'show databases' | grep -qx {DATABASE}"""


def make_database(digest: str) -> str:
    """Takes SQL from standard input, once the server answers. One that Shoal did not make is left alone."""
    return f"""\
set -eu
for i in $(seq 300); do mariadb -e 'select 1' >/dev/null 2>&1 && break || sleep 0.2; done
there=$(mariadb -N -e "show databases like '{DATABASE}'")
[ -z "$there" ] || grep -qx database {STATE_DIR}/made 2>/dev/null ||
  {{ echo 'a database {DATABASE} was there before Shoal; rename it' >&2; exit 1; }}
{recorded("made", "database")}
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


def answers(node: str) -> str:
    """Whether the controller counts on the node: one word for its state, none of those that mean trouble."""
    return f"""\
state=$(scontrol show node {node} 2>/dev/null | sed -n 's/^ *State=\\([^ ]*\\).*/\\1/p')
case $state in *DOWN*|*DRAIN*|*NOT_RESPONDING*|*UNKNOWN*|*'*'*|'') exit 1 ;; *) exit 0 ;; esac"""


def await_answer(node: str, patience_s: int) -> str:
    return f"""\
for i in $(seq {patience_s}); do ({answers(node)}) && exit 0; sleep 1; done
scontrol show node {node} | grep -E 'State=|Reason=' | sed 's/^ *//' >&2
exit 1"""
