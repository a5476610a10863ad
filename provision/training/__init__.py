"""Training jobs: the job file, where its processes run, launching, watching and stopping them."""
