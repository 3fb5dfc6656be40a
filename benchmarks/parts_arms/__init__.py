"""Who answers the mixed traffic in `bench-parts`: one way each, in a process and a memory group of its own."""
