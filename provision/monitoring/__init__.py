"""Files for Prometheus and Grafana that show a cluster.

Imports ``provision.cluster`` and below.
"""
