"""Commands about jobs: submit, follow, list, explain, stop and retry.

`run.run` has the flags of `shoal run`. It hands them to `submit.submit_flags`, or a job file to
`run.submit_file`; both send the job, print the notes of `submit.job_notes`, and call `submit.follow`, which
prints the job's name or hands the job to `follow.follow_job`. That explains a wait by
`why.explanation_lines` and prints the output by `logs.print_stream`. `main` calls `submit` directly when the
fast path could read the command line, so `submit` imports nothing of the command tree.

`queue`, `logs`, `metrics`, `checkpoints`, `why` and `stop_and_retry` stand alone: they ask the server once or
poll it, and print.
"""
