"""What of a model stays in memory, what streams, and what that costs: from headers alone, before anything is read."""
