"""Changes of hosts: survey, plan, consent, apply, verify; also rollback, destroy and doctor.

Imports ``provision.jobs`` and below: a running job is asked about before its host is changed.
"""
