"""The data plane by HAProxy, which serves the same tables as the embedded one.

`plane.py` runs HAProxy as a child process and takes each table. `validation.py` drops what HAProxy cannot
serve and resolves host names. `render.py` makes the configuration and its maps, with `backends.py` for each
service. Then `runtime_api.py` compares the result with the one in use: small changes go through HAProxy's
socket; for others, `config_files.py` writes and checks the files and HAProxy reloads. `statistics.py` turns
HAProxy's counters into reports. No request passes through this code.
"""
