"""Who runs the large model in `bench-weights`: one module an arm, each in a process and a memory group of its own."""
