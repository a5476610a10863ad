"""From an inventory file to a checked cluster: reading, vaults, clouds, the schema, edits.

Imports ``provision.cluster`` and below. Nothing here knows of jobs or reaches a host.
"""
