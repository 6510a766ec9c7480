"""Inside a rank: what a program gets that uses `shoal.runtime`. The only part of Shoal that imports torch.

Outside of Shoal it works too, as under `torchrun` or alone: then there is nobody to replace a rank.
"""
