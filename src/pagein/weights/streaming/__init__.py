"""A model whose weights come and go while it computes: the ring, and what hangs units in and out."""
