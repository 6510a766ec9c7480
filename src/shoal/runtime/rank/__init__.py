"""The library inside a rank, behind `shoal.runtime`. The only part of Shoal that imports torch.

`loop.train` runs the training function once for each rendezvous round:

1. `membership` reads the rank's assignment from the `board`, a page of memory shared with the supervisor, and
writes the rank's heartbeats there. 2. `process_group` waits until all ranks have come to the store of the
round, and forms the torch group. 3. `training_state` copies the newest state to ranks that lack it, or
`checkpoint` loads it. 4. The training function iterates `Run.steps`. `timing` measures the steps, `sampler`
orders the samples, and `checkpoint` saves when a save is due. 5. If a peer is lost, `process_group` cuts the
connections of the round, and the loop joins the next round. 6. On SIGTERM, `graceful_stop` makes all ranks
agree on a step after which they save and exit.

`reporter` is for the callbacks of other libraries. All of this also works outside of Shoal, under `torchrun`
or alone, but then no supervisor replaces a lost rank.
"""
