"""The systems measured. Each module starts the real system on loopback, and stops all it started."""
