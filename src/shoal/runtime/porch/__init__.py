"""The porch of a replica on another machine: where data planes come to its server, over TLS, and nobody else.

`minder` is the part of the supervisor that has one, `process` is the porch itself, `passage` is one
connection through it, `reach` its end at the server. It passes bytes on as they come and knows no HTTP.
"""
