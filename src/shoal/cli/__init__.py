"""The `shoal` command line. It prints what the server says and decides nothing by itself.

`main.run_command` is called first. `arguments.read_run` reads the usual forms of `shoal run` without the
command tree. For everything else `main` builds the tree from `COMMANDS`, and the tree imports the module of
the command that was typed and calls its function. A command takes its flags and its connection from `flags`,
asks the server through `shoal.client`, turns the reply into text with `text` and `event_text`, and prints it
with `output` and `progress`.

Each command imports what it needs when it runs, so that start-up stays under 150 ms of CPU.
"""
