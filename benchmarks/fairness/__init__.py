"""One caller with a hundred times its share, through the real data plane: how much the other
callers notice.
"""
