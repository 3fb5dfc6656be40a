"""The scenarios of several models on one machine, stated once and run against any manager that has an adapter."""
