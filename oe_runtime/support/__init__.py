"""For every package here: files that survive a power cut, signals, quiet imports, tokens, horovodrun.

Of `oe_runtime` it imports only `errors`.
"""
