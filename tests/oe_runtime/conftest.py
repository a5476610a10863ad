"""Fixtures of several files of tests."""

from object_store import object_store, object_store_server
from small_disk import disk

__all__ = ["disk", "object_store", "object_store_server"]
