"""The `shoal` command: one file per noun. Prints, never decides.

Each command imports what it needs when it runs: start-up stays under 150 ms of CPU.
"""
