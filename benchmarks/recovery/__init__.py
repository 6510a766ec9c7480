"""How long a training run stands still when a rank is killed or hangs: Shoal beside torchrun."""
