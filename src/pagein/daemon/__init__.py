"""The one inbox and the one writer; what carries its decisions out; the wiring."""
