"""How much of its time a training run keeps under a schedule of faults: Shoal beside torchrun."""
