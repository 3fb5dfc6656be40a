"""What the benchmarks share: arms (Pagein and its peers, set up alike), a small HTTP client, results."""
