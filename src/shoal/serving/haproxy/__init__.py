"""The data plane by HAProxy: a table becomes its configuration (pure), small changes go through its socket.

Nothing here touches a request: HAProxy does, as a child of ours that outlives every table.
"""
