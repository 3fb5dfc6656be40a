"""What the parts engine computes: tasks of one split model, several at once, each with the parts that it needs."""
