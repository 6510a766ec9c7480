"""A real cluster on a disk that fills up or freezes, without descriptors, under a clock that jumps."""
