#!/usr/bin/env python3
"""Stand-in for ipmctl on virtual lab nodes, which it cannot see: keeps goals, prints the real tool's formats."""

PACKAGE_VERSION = "03.00.00.0468-oeprov1"
