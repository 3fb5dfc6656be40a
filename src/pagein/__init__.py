"""Pagein: virtual memory for AI models."""

__version__ = "0.1.0"
