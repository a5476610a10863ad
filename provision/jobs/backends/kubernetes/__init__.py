"""A training job on a Kubernetes cluster: its manifests, and launching it through the API."""
