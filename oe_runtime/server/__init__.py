"""A parameter server process: its command line (`cli`) and its metrics (`metrics`).

    python -m oe_runtime.server --host 127.0.0.1 --port 0 --storage dram --ready-file server.json

The tables, the protocol and the storage are in the C++ core; clients are `oe_runtime.Client`.
"""
