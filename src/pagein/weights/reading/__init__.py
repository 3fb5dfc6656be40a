"""Bytes of weights on their way from the disk: which files hold them, and how they are read fastest."""
