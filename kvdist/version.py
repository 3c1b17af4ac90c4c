"""The version, in a module of its own so that every floor may know it."""

__version__ = "0.3.0.dev0"
