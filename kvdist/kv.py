"""Stores by name: the public face of `kvdist.kvstore`."""

from kvdist.kvstore import KVStore, KVStoreBase, create, register, register_command

__all__ = ["KVStore", "KVStoreBase", "create", "register", "register_command"]
