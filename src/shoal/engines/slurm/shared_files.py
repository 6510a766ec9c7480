"""Files on the directory that all nodes share: folders of owners, and output files of Slurm jobs. Pure.

If each person has a Unix account, a job runs under the account with the owner's name, and that is the whole
rule. An admin creates users, so an admin decides who is who; a table beside that would be a second place
for it.

Each Slurm job has one output file, with the output of node agents that could not report to us; most are
empty. Its name has only the attempt and replacement number, because Slurm replaces `%` and a letter in such
a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import msgspec

from shoal.errors import EngineRefused

FIRST_UID = 1000
SYSTEM_UIDS = range(60_000, 65_536)
"""Above the uids of people, and given to daemons: Debian's `slurm` is 64030, `nobody` 65534."""
CREATE_OWNER_FOLDERS = """\
set -eu
umask 077
shared=$1 uid=$2 gid=$3
shift 3
refuse() { echo "$1" >&2; exit 3; }
cd -P -- "$shared" 2>/dev/null || { echo "there is no directory $shared" >&2; exit 4; }
case $(stat -c '%u %a' .) in
    "0 "*[0145][15]) ;;
    *) refuse "$shared must be root's, for others to pass and not to write: chown root, chmod 755" ;;
esac
here=$(pwd -P) above=$(pwd -P)
while [ "$above" != / ]; do
    above=$(dirname -- "$above")
    case $(stat -c '%u %a' -- "$above") in
        "0 "[1357]??? | "0 "*[0145][0145]) ;;
        *) refuse "others than root can replace $shared: they may write to $above" ;;
    esac
done
for place; do
    top=${place%/*}
    mkdir -p -m 0711 -- "$top"
    [ ! -L "$top" ] || refuse "$shared/$top is a link"
    [ "$(stat -c %u -- "$top")" = 0 ] || refuse "$shared/$top must be root's: chown root $shared/$top"
    chmod 0711 -- "$top"
    [ -L "$place" ] || mkdir -p -m 0700 -- "$place"
    [ ! -L "$place" ] || refuse "$shared/$place is a link"
    owner=$(stat -c %u -- "$place")
    case $owner in
        "$uid") ;;
        0) chown -h -- "$uid:$gid" "$place" ;;
        *) refuse "$shared/$place belongs to user $owner" ;;
    esac
    setpriv --reuid="$uid" --regid="$gid" --init-groups test -w "$here/$place" ||
        refuse "user $uid cannot get to $here/$place: what lies above it must let others pass (chmod o+x)"
done
"""
"""A script for `sh -c`, as root, with a directory that all nodes share, a uid, a gid, and folders.

It creates the folders below the directory for that user alone. It works only where no user but root can
replace a path, so that it follows no link of a user. With exit code `REFUSED`, standard error has the
reason. May be repeated."""
REFUSED = 3


class UnixAccount(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: int
    gid: int
    home: str = "/"


def parse_account(name: str, line: str) -> UnixAccount | None:
    """Parse a line of `getent passwd NAME`. None: another name, because `getent` takes a number for a uid."""
    fields = line.strip().split(":")
    if len(fields) < 6 or fields[0] != name:
        return None
    return UnixAccount(name=name, uid=int(fields[2]), gid=int(fields[3]), home=fields[5])


def check_account(owner: str, account: UnixAccount | None, system_accounts: Collection[str]) -> UnixAccount:
    """Return the account, if people's jobs may run under it.

    `EngineRefused`: the message is for the owner, who sees it as the end of the job.
    """
    if account is None:
        why = (
            f"jobs run here under the Unix account of their owner, and none is called `{owner}`: submit as a "
            "user who has one on the login node and on every node, or have it made there"
        )
    elif account.uid == 0:
        why = (
            f"the Unix account of its owner `{owner}` is root's (uid 0), and nothing runs as root here: "
            "submit as a user with an account of their own; an admin makes one with `shoal user create NAME`"
        )
    elif (account.uid < FIRST_UID or account.uid in SYSTEM_UIDS) and owner not in system_accounts:
        why = (
            f"the Unix account of its owner `{owner}` has uid {account.uid}, one of a system's own accounts: "
            f"submit as another user, or have root connect with `--system-accounts {owner}`"
        )
    else:
        return account
    raise EngineRefused(why, hint="`shoal login` says who you are", owner=owner)


OUTPUT_PATH = re.compile(r"(?:[^/.\x00][^/\x00]*/)?shoal-(?P<attempt_id>[^/\x00]+)\.[0-9]+\.out")
LIST_OUTPUTS = """\
[ ! -L "$1" ] && cd -P -- "$1" 2>/dev/null && [ -O . ] || exit 0
find . -mindepth "$2" -maxdepth "$2" -type f -name 'shoal-*.out' -printf '%s %P\\0' 2>/dev/null
exit 0
"""
"""A script for `sh -c`, with the folder of outputs and their depth in it: prints the size and path of each.

Root looks through owners' folders. `find` ignores links, and only root can replace a folder in one that is
root's (`CREATE_OWNER_FOLDERS`). Of a folder that is not ours, nothing is printed. If an owner makes a
folder unreadable, only that owner loses by it."""
REMOVE_OUTPUTS = """\
[ ! -L "$1" ] && cd -P -- "$1" 2>/dev/null && [ -O . ] || exit 0
exec xargs -0 -r rm -f --
"""
"""A script for `sh -c`, with the folder, and paths on standard input: removes these files."""


def output_name(attempt_id: str, replacement: int) -> str:
    return f"shoal-{attempt_id}.{replacement}.out"


def parse_outputs(listing: str) -> dict[str, int]:
    """Parse the output of `LIST_OUTPUTS`: size by path. A path may hold anything but a NUL."""
    entries = (entry.partition(" ")[::2] for entry in listing.split("\0") if entry)
    return {path: int(size) for size, path in entries}


def unneeded_outputs(sizes: Mapping[str, int], archived: Collection[str], old: Collection[str]) -> list[str]:
    """Return the paths of outputs that no reader needs: empty ones of archived attempts, and all of the
    `old`.

    Running attempts are neither, and attempts of another home, which may use the same directory, are
    unknown here.
    """
    named = ((path, size, OUTPUT_PATH.fullmatch(path)) for path, size in sizes.items())
    ours = ((path, size, match["attempt_id"]) for path, size, match in named if match is not None)
    gone = frozenset(old)
    return sorted(
        path
        for path, size, attempt_id in ours
        if attempt_id in gone or (size == 0 and attempt_id in archived)
    )
