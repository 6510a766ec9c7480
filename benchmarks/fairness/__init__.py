"""One caller with a hundred times its share, through the real data plane: what the others notice of it."""
