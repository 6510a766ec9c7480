"""Processes of a task: start them, carry their output into the log, measure them, find and kill them.

    launcher     forks one process, confines it and executes the program
    watcher      the supervisor's loop: reads the pipes, notices how processes end
    log          the task's log file and the job's log rules
    output_tail  picks the traceback or the last lines that say why a process failed
    meter        a thread that collects what ranks log and samples CPU, memory and (`gpu_usage`) GPUs
    network      chooses the interfaces for NCCL and Gloo, and finds free and used ports
    tree         finds and kills every process of a task by cgroup, descent and marks
    kernel       Linux calls that Python lacks
    fork_server  forks whole supervisors for an engine in a few milliseconds

`launcher` hands pipes to `watcher`, which gives each line to `log` and to the process's `output_tail`. When
the task ends, `tree` kills what is left.
"""
