"""What is made here and brought to hosts: wheels and bundles.

Imports ``provision.hosts`` and below.
"""
