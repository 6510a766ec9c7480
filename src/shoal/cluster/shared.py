"""Whether a directory is the same on every machine: the controller leaves a mark there. Pure text for `sh`.

Nothing is mounted, and no directory is made.
"""

from __future__ import annotations

from shoal.cluster.shell import recorded

SHARED_MARK = ".shoal-cluster"
PATIENCE = 20
"""How often a mark is looked for, twice a second: what was just written may show late over NFS."""
_AS_LOGIN = 'as=; [ -z "${SUDO_UID:-}" ] || as="setpriv --reuid $SUDO_UID --regid $SUDO_GID --init-groups"'
"""Who works there later must be able to: root may be nobody on a file system of another machine."""


def is_there(folder: str) -> str:
    return f"{_AS_LOGIN}\n$as test -d {folder}"


def has_mark(folder: str, mark: str) -> str:
    return f"""\
{_AS_LOGIN}
[ "$($as cat {folder}/{SHARED_MARK} 2>/dev/null)" = '{mark}' ]"""


def leave_mark(folder: str, mark: str) -> str:
    """Others may write to the folder: what they laid there under that name is replaced, never written to."""
    return f"""\
{_AS_LOGIN}
[ -d {folder} ] || {{ echo 'there is no directory {folder}; make or mount it on every machine' >&2; exit 1; }}
{recorded("made", f"mark {folder}/{SHARED_MARK}")}
$as sh -c 'set -eC
new=$(mktemp -u {folder}/{SHARED_MARK}.XXXXXXXXXX)
echo "{mark}" >"$new"
mv -fT "$new" {folder}/{SHARED_MARK} || {{ rm -f "$new"; exit 1; }}'"""


def drop_mark(path: str) -> str:
    return f"{_AS_LOGIN}\n$as rm -f {path}"


def miss_mark(folder: str, mark: str, controller: str) -> str:
    """Nothing to change: it says what is wrong, unless a slow file system shows the mark meanwhile."""
    return f"""\
for i in $(seq {PATIENCE}); do ({has_mark(folder, mark)}) && exit 0; sleep 0.5; done
{_AS_LOGIN}
[ -d {folder} ] || {{ echo 'there is no directory {folder}; mount it as on {controller}' >&2; exit 1; }}
seen=$($as head -n 1 {folder}/{SHARED_MARK} 2>/dev/null | head -c 100)
if [ -z "$seen" ]; then echo '{folder} is a directory of this machine alone; mount it as on {controller}' >&2
else printf "%s has the mark '%s', not '{mark}': mount it as on {controller}\\n" {folder} "$seen" >&2; fi
exit 1"""
