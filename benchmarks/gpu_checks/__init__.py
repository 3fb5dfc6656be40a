"""What `bench-gpu` checks on a CUDA device: that nothing of the result changes, and what a token costs."""
