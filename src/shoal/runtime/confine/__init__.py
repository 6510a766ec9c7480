"""Walls and limits around a share's processes: cgroups, bubblewrap, another user, or rlimits.

`detect.detect()` says what works here; `confinement.Confinement` puts it around one share.
"""
