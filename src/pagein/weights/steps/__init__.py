"""Several forward passes in step, and several tokens a pass."""
