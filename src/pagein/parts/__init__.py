"""Parts on demand: one backbone, many capabilities, only what a request needs."""
