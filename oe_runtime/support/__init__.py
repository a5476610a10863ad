"""For every package here: durable files, signals, command lines, quiet imports, tokens, horovodrun.

Of `oe_runtime` it imports only `errors`.
"""
