"""Limits and isolation for the processes of a task: cgroups, bubblewrap, a uid of its own, a firewall,
rlimits.

1. `detect` tries which mechanisms work on this machine. 2. `confinement.Confinement` applies them to one
task. `prepare` makes the cgroups (`resource_limits`), closes the network of the project (`firewall`) and
starts the sandbox (`sandbox`), whose file system view comes from `sandbox_view` and whose mounts come from
`mounts`. 3. Each child process calls `Confinement.enter` right after its fork, before it executes anything of
the job. 4. `Confinement.kill` ends all processes of the task, and `remove` deletes its cgroups.
"""
