"""Start ranks without repeating their imports, and turn launchers into the programs behind them.

1. `install` runs once for each task. It writes stand-ins for `python`, `torchrun`, `mpirun`, `srun` and
others into a folder at the front of the ranks' PATH, and copies the other files of this folder beside them.
2. `zygote` is started next. It imports what the programs in `run` import (`program.imported_by`). 3. A script
in a rank calls a stand-in, `stand_in.main`. `launchers.recognize` finds launchers, `launcher_lock` lets only
one launcher of a rank run at a time, `options` and `launcher_config` read the launcher's options, and
`launchers.program_arguments` returns the program behind it. `srun` and `mpirun` have their own files. 4. The
stand-in asks the zygote to fork the program (`program.run`), or executes the real interpreter. 5. `hook` is
the `sitecustomize` of each Python in a rank. It catches launchers that were started by path, and reports the
process groups that the program forms.

The copied files run with the job's own interpreter, so they import only the standard library and each other.
They only make a start faster. If anything fails here, the rank starts in the ordinary way.
"""
