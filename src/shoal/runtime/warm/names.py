"""Files in the folder of the stand-ins that the supervisor knows of, too."""

from __future__ import annotations

IMAGE = "image"
"""Which modules the zygote has imported from where, and how much memory that took."""
EXPECTED = "expected"
"""Which it should import, and from where: those of the one before it."""
WORLDS = "worlds"
"""Which process groups the ranks have formed: a line for each process."""
LAUNCHING = "launching"
"""Locked by the launcher that each rank stands behind: a byte for each rank."""
MEMBERS = "members"
"""Locked in the same way by the process of each rank that is in the job's process group."""
SECOND = "second-launcher"
"""In a line of `WORLDS`, in place of a library: the rank has run two launchers, or two programs that are in
the job's process group, at the same time."""
REFUSED = "refused-launcher"
"""In the same place: the rank has started a launcher that was refused."""
LAUNCHED = "other-launcher"
"""In the same place: a launcher that is not Shoal's started the process and gave it its number."""
