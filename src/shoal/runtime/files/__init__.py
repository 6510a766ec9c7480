"""Files of a task on a node: the spool, the work directory, caches and checkpoints.

    spool               the directory in which an engine and a supervisor leave each other a task's files
    unpack              puts the files of the job's snapshot into the work directory
    job_files           explains a missing file by what did not travel, and counts what the ranks wrote
    checkpoint_storage  opens and links the checkpoint directory, and notices the last save
    caches              one cache directory for each project and user, with its lock
    cache_cleanup       keeps a cache within its size, and removes locks of builds that were killed
    removal             removes a tree of any shape within a time limit

A supervisor claims its task in the `spool`. It runs `unpack` as the job's user, opens `checkpoint_storage`
and `caches`, and asks `job_files` at the end. The engine or the node agent calls `removal` afterwards.
"""
