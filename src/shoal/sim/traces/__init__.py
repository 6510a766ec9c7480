"""Logs of real clusters, as jobs: one file for each format, read line by line, no line guessed at."""
