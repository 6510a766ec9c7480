"""One file per revision, in order of their numbers."""
