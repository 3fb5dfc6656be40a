"""Configuration: typed YAML with the environment over it; the only place that has defaults."""

from pagein.config.load import load_settings, parse_settings
from pagein.config.schema import Model, Priority, Settings

__all__ = ["Model", "Priority", "Settings", "load_settings", "parse_settings"]
