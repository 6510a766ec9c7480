"""The control plane of this machine: start it, stop it, and the server process itself.

`up.up` hands its flags to `daemon.start`, which takes settings and remembered options from `home`, and spawns
`python -m shoal.cli.control_plane.server`. `server.main` holds the home's lock, waits as `standby` while
another control plane leads, opens the control plane, listens, and writes `server.json`; `daemon.start` waits
for that file. While it leads, `data_plane.supervise` keeps the process that serves requests of services.
`up.down` calls `daemon.stop`. `status` asks a running server.

`home` imports neither the server nor the data plane, so that `shoal down` starts fast.
"""
