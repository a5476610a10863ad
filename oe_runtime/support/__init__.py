"""Help from below for every package here: files that survive a power cut, signals, quiet imports, tokens.

Imports nothing else of `oe_runtime`.
"""
