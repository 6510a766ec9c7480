"""`shoal backup` and `shoal restore`: a home in one tar file, as of one event of its log.

`commands.backup` asks the running control plane for a copy of its SQLite database through `database_copy`.
For PostgreSQL it makes the copy itself. It then walks the home with `files.walk_home` and
`files.walk_of_jobs` and writes every file of the walk with `archive.BackupWriter`. The manifest is the last
member and holds the hashes.
`commands.restore` and `--verify` read the file with `archive.read_archive`, which compares every member with
the manifest. `restore` then gives checkpoints to the users of their projects (`files.give_checkpoints`).
"""
