"""Scripts of `sh` about packages, with the looks that say whether they are needed. Pure text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.facts import STATE_DIR


def are_installed(packages: Sequence[str]) -> str:
    return "\n".join(
        f"dpkg-query -W -f='${{db:Status-Abbrev}}' {name} 2>/dev/null | grep -q ^ii || exit 1"
        for name in packages
    )


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
    names = " ".join(packages)
    return f"""\
set -eu
for name in {names}; do
  dpkg-query -W -f='${{db:Status-Abbrev}}' $name 2>/dev/null | grep -q ^ii ||
    grep -qxF $name {STATE_DIR}/packages 2>/dev/null || echo $name >>{STATE_DIR}/packages
done
{_APT}
$apt install --no-install-recommends {names} </dev/null >{_LOG} 2>&1 || {{
  dpkg --configure -a </dev/null >{_LOG} 2>&1 || true # an earlier install may have been cut off
  update || {{ tail -n 5 {_LOG} >&2; exit 1; }}
  $apt install --no-install-recommends {names} </dev/null >{_LOG} 2>&1 || {{ tail -n 5 {_LOG} >&2; exit 1; }}
}}"""


def are_newest(packages: Sequence[str]) -> str:
    """Asks the archives first: the one look that writes, and only apt's own lists."""
    names = " ".join(packages)
    return f"""\
apt='apt-get -q -o DPkg::Lock::Timeout=300 -o APT::Update::Error-Mode=any'
$apt update </dev/null >/dev/null 2>&1 || exit 1
! LC_ALL=C apt-get -s install --only-upgrade {names} </dev/null 2>/dev/null | grep -q '^Inst '"""


def upgrade(packages: Sequence[str]) -> str:
    """An archive that cannot be asked is a failure: nobody should take old packages for the newest."""
    names = " ".join(packages)
    return f"""\
set -eu
{_APT}
update -o APT::Update::Error-Mode=any || {{ tail -n 5 {_LOG} >&2; exit 1; }}
$apt install --only-upgrade --no-install-recommends {names} </dev/null >{_LOG} 2>&1 ||
  {{ tail -n 5 {_LOG} >&2; exit 1; }}"""


def remove_packages(names: Sequence[str]) -> str:
    """All of these but those with which apt would also remove what somebody else installed."""
    mine = " ".join(f"-e {name}" for name in names)
    return f"""\
set -eu
gone=
for name in {" ".join(names)}; do
  others=$(LC_ALL=C apt-get -s remove $name </dev/null 2>/dev/null | sed -n 's/^Remv \\([^ ]*\\).*/\\1/p' |
    grep -vxF {mine} || true)
  [ -n "$others" ] || gone="$gone $name"
done
[ -z "$gone" ] || DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 remove $gone \\
  </dev/null >{_LOG} 2>&1 || {{ tail -n 5 {_LOG} >&2; exit 1; }}"""
