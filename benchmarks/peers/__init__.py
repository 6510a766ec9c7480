"""The systems measured: each starts the real thing on loopback, and stops all it started."""
