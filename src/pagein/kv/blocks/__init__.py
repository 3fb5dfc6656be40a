"""Which blocks of KV there are and what they are called: no torch, no files, no clock."""
