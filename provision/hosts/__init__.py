"""How hosts are reached and what is known of them: SSH, payloads, surveys, playbooks, the journal.

Imports ``provision.inventory`` and below. What is to be done on a host is decided above.
"""
