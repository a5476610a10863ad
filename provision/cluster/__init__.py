"""What a cluster is: its settings (declared here alone), hosts, facts of flavors, errors.

Imports ``provision.node`` alone: nothing here reads a file of the user's or reaches a host.
"""
