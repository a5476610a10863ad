"""What runs on the nodes and on the controller alike: standard library only, Python 3.6 and later.

Nothing here imports anything else of this project. The whole directory travels to a node as one zip
(``provision.hosts.observe``) and is imported by the roles' modules.
"""
