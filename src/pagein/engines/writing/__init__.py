"""What the transformers engine computes: one thread, the requests that take turns in it, texts from and to tokens."""
