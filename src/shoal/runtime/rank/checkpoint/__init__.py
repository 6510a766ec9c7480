"""Checkpoints of a running group: staged in memory, written in the background, committed whole or not at all.

`manifest`, `folder` and `objects` know files and need no torch; `parts`, `writer` and `flight` know tensors.
`checkpoints` joins them. The format inside a checkpoint is torch.distributed.checkpoint's.
"""
