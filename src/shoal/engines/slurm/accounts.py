"""The Unix account that a job runs under where each person has their own. Pure.

It is the one of the owner's name, and that is the whole rule. An admin makes users, so an admin says who is
who; a table beside that would be a second place where it is said.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from shoal.errors import EngineRefused

FIRST_UID = 1000
SYSTEM_UIDS = range(60_000, 65_536)
"""Above those of people, and given to daemons: Debian's `slurm` is 64030, `nobody` 65534."""
GIVE = """\
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
"""For `sh -c`, as root, with a directory that all nodes share, uid, gid, and folders: makes these below it
for that user alone. Only where nobody but root can put anything in the way, so that no link is followed that
a user laid. Exit code `REFUSED`: in words on standard error. May be repeated.
"""
REFUSED = 3


class Account(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: int
    gid: int
    home: str = "/"


def parse_account(name: str, line: str) -> Account | None:
    """A line of `getent passwd NAME`. None: of another name: `getent` takes a number for a uid."""
    fields = line.strip().split(":")
    if len(fields) < 6 or fields[0] != name:
        return None
    return Account(name=name, uid=int(fields[2]), gid=int(fields[3]), home=fields[5])


def fit_account(owner: str, found: Account | None, system_accounts: Collection[str]) -> Account:
    """The account, if people's jobs may run under it. `EngineRefused`: in words for its owner, who sees them
    as the end of the job.
    """
    if found is None:
        why = (
            f"jobs run here under the Unix account of their owner, and none is called `{owner}`: submit as a "
            "user who has one on the login node and on every node, or have it made there"
        )
    elif found.uid == 0:
        why = (
            f"the Unix account of its owner `{owner}` is root's (uid 0), and nothing runs as root here: "
            "submit as a user with an account of their own; an admin makes one with `shoal user create NAME`"
        )
    elif (found.uid < FIRST_UID or found.uid in SYSTEM_UIDS) and owner not in system_accounts:
        why = (
            f"the Unix account of its owner `{owner}` has uid {found.uid}, one of a system's own accounts: "
            f"submit as another user, or have root connect with `--system-accounts {owner}`"
        )
    else:
        return found
    raise EngineRefused(why, hint="`shoal login` says who you are", owner=owner)
