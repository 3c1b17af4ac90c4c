"""Stores by name: the public names of `kvdist.kvstore`."""

from kvdist.kvstore import KVStore, KVStoreBase, create, register, register_command

__all__ = ["KVStore", "KVStoreBase", "create", "register", "register_command"]
