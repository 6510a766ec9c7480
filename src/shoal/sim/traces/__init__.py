"""Logs of real clusters, as jobs: one file for each format, read line by line. No line is guessed.

`trace` opens files and defines `TraceJob`; `swf`, `openb` and `table` read the formats.
"""
