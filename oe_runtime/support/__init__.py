"""For every package here: durable files, signals, words of a command line, quiet imports, tokens, horovodrun.

Of `oe_runtime` it imports only `errors`.
"""
