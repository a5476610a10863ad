"""Where a job's processes run: on this machine, on hosts over SSH, in containers, on Kubernetes."""
