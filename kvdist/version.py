"""The version, in a separate module so that every layer may import it."""

__version__ = "0.3.0.dev0"
