"""The lease of one task: renew it with the control plane, and decide when the task must stop.

    renewal        a thread that sends a signed heartbeat at intervals, and leaves the reply for the main loop
    addresses      which control plane to ask next, and where else the leader may be
    http_exchange  one request over HTTP, with one limit for its time and one for its size
    resolver       look up a host name with a timeout
    stop_reasons   what the main loop asks each turn: must the task stop, and why

`renewal` asks `addresses` for a URL and hands the heartbeat to `http_exchange`, which connects to what
`resolver` returns. A reply counts only with a proof that it comes from the control plane. `stop_reasons`
reads the newest reply, the stop file, the clocks and the signals.
"""
