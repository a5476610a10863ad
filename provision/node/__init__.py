"""The brain of provisioning, on hosts and on the controller: standard library only, Python 3.6 and later.

Nothing here imports anything else of this project. ``provision.hosts.payload`` sends the needed modules to a
host, and the roles' modules import them. The package is flat, one file per subject; ``family_*.py`` and
``platform_*.py`` are data for two registries, ``families.py`` and ``platforms.py``.
"""
