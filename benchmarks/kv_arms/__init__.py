"""What `bench-kv` runs: ways to keep KV under the same load, and what single steps cost."""
