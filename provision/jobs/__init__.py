"""Training jobs: request, placement, launch, supervision, views; on hosts, in containers, on Kubernetes.

Imports ``provision.artifacts`` and below. Hosts are changed by ``provision.converge``, not here.
"""
