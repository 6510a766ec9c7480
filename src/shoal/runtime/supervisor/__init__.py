"""The supervisor: the process that runs one task on its node, from its task spec to its outcome.

    entry                 claims the task, reads the credentials and makes a `TaskRun`
    task_run              the life of the task: it uses all files below, and writes the outcome
    preparation           before the ranks: unpack, link the checkpoint directory, run `setup`
    environment           the environment of each rank
    rank_group            the ranks of this node in one rendezvous round
    restarts              may a failed group be started again in place, and which round comes next
    hang_detector         finds ranks that make no step, by `step_pace` and `hang_snapshot`
    flight_recorder       collects PyTorch's records of the last NCCL calls when ranks hang
    world_check           compares the program's process groups with the ranks that Shoal started
    unfinished_launchers  finds launchers and other processes that outlive a rank's `run`
    drills                does what a drill asks for (`checkpoint_damage` in a process of its own)
    endings               words the outcome

`TaskRun` prepares, has `rank_group` form a group, and polls until a process fails, all end well, or there is
a reason to stop. Then it asks `restarts` whether another group may follow. At the end it kills what is left.
"""
