"""Files of a split: the one way to open a part, what proves it, and who signed it."""
