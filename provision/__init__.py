"""Observes hosts, plans what they need, applies it, and launches training on them."""

__version__ = "0.2.0"
