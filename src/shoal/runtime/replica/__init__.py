"""The server of a replica: where it listens, whether it answers, and the sidecar in front of it.

    server           the supervisor's view of the server; it uses all files below
    listeners        a port, a socket file or a port in a private network at which the server listens
    probe            a thread that asks whether the server is ready, and puts it to sleep or wakes it
    sidecar_monitor  starts the sidecar of a replica on another machine, and starts it again
    sidecar_config   what the monitor hands the sidecar
    sidecar          the entry point of the sidecar's process
    sidecar_process  the sidecar's loop: takes TLS connections from data planes and no others
    tunnel           one connection through the sidecar, from the handshake to its end

The sidecar passes bytes on as they come and knows no HTTP.
"""
