"""Shell scripts about packages, with the checks that say whether they are needed. Pure text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.facts import STATE_DIR


def is_in_state(names: str, pattern: str) -> str:
    """Whether one of the packages is in a dpkg state: the wanted state, then the actual one, as `ii` or
    `hi`.
    """
    return f"dpkg-query -W -f='${{db:Status-Abbrev}}\\n' {names} 2>/dev/null | grep -q '{pattern}'"


def are_installed(packages: Sequence[str]) -> str:
    return "\n".join(f"{is_in_state(name, INSTALLED)} || exit 1" for name in packages)


def _not_on_hold(packages: Sequence[str]) -> str:
    """Set `names` to the packages not on hold: apt would refuse to touch a held one, and all others with
    it.
    """
    return f"""\
names=
for name in {" ".join(packages)}; do {is_in_state("$name", ON_HOLD)} || names="$names $name"; done"""


INSTALLED, ON_HOLD = "^.i", "^h"
_LOG = f"{STATE_DIR}/apt.log"
_APT = f"""\
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
apt='apt-get -q -y -o DPkg::Lock::Timeout=300 -o Dpkg::Options::=--force-confold'
update() {{
  for i in $(seq 30); do
    $apt "$@" update </dev/null >{_LOG} 2>&1 && return 0
    grep -q 'Could not get lock' {_LOG} || return 1
    sleep 10 # a machine that was just made asks for news by itself, and apt does not wait for that lock
  done
  return 1
}}"""


def install(packages: Sequence[str]) -> str:
    """Install only what is missing, so that a database that was there before is not upgraded along with
    it.
    """
    return f"""\
set -eu
missing=
for name in {" ".join(packages)}; do
  {is_in_state("$name", INSTALLED)} && continue
  missing="$missing $name"
  grep -qxF $name {STATE_DIR}/packages 2>/dev/null || echo $name >>{STATE_DIR}/packages
done
{_APT}
install() {{ $apt install --no-install-recommends --no-remove $missing </dev/null >{_LOG} 2>&1; }}
install || {{
  dpkg --configure -a </dev/null >{_LOG} 2>&1 || true # an earlier install may have been cut off
  update && install || {{ tail -n 5 {_LOG} >&2; exit 1; }}
}}"""


def are_newest(packages: Sequence[str]) -> str:
    """Whether all are up to date. Updates the package lists: the one check that writes, and only these
    lists.
    """
    return f"""\
{_not_on_hold(packages)}
apt='apt-get -q -o DPkg::Lock::Timeout=300 -o APT::Update::Error-Mode=any'
$apt update </dev/null >/dev/null 2>&1 || exit 1
! LC_ALL=C apt-get -s install --only-upgrade $names </dev/null 2>/dev/null | grep -q '^Inst '"""


def upgrade(packages: Sequence[str]) -> str:
    """Upgrade the packages. Fails if an archive cannot be read: old packages must not pass for the newest."""
    return f"""\
set -eu
{_not_on_hold(packages)}
{_APT}
update -o APT::Update::Error-Mode=any || {{ tail -n 5 {_LOG} >&2; exit 1; }}
$apt install --only-upgrade --no-install-recommends --no-remove $names </dev/null >{_LOG} 2>&1 ||
  {{ tail -n 5 {_LOG} >&2; exit 1; }}"""


def remove_packages(names: Sequence[str]) -> str:
    """Remove all packages except those on hold and those with which apt would remove a user's packages."""
    mine = " ".join(f"-e {name}" for name in names)
    return f"""\
set -eu
gone=
{_not_on_hold(names)}
for name in $names; do
  others=$(LC_ALL=C apt-get -s remove $name </dev/null 2>/dev/null | sed -n 's/^Remv \\([^ ]*\\).*/\\1/p' |
    grep -vxF {mine} || true)
  [ -n "$others" ] || gone="$gone $name"
done
[ -z "$gone" ] || DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 remove $gone \\
  </dev/null >{_LOG} 2>&1 || {{ tail -n 5 {_LOG} >&2; exit 1; }}"""
