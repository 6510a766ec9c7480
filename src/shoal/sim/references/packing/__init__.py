"""Packing without time: pods arrive in an order and stay; what fits nowhere is dropped.

The experiment of Weng et al., "Beware of Fragmentation" (USENIX ATC'23), and three of its policies.
"""
