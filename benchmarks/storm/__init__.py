"""A real daemon with fake engines under everything that goes wrong: chaos, kills of the daemon, endurance."""
