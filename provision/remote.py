"""One command on one host over SSH, through Fabric, with every way it can fail said in words."""

from __future__ import annotations

import io
import logging
import socket
import threading
from typing import Any

from provision.errors import HostError
from provision.inventory import Host


def run(host: Host, command: str, text: str, connect_timeout: int, timeout: int) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of ``command`` with ``text`` as its standard input.

    Raises HostError when the host cannot be reached, refuses us, or is not the host that it was.
    """
    import fabric
    import paramiko
    from invoke.exceptions import CommandTimedOut
    from paramiko.ssh_exception import (
        AuthenticationException,
        BadHostKeyException,
        NoValidConnectionsError,
        SSHException,
    )

    # Paramiko prints tracebacks of its transport thread; everything it knows is in the exception.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    where = f"{host.address} port {host.port}"
    options: dict[str, Any] = {"key_filename": host.private_key} if host.private_key else {}
    connection = fabric.Connection(
        host.address,
        user=host.user or None,
        port=host.port,
        connect_timeout=connect_timeout,
        connect_kwargs=options,
    )
    connection.client.load_system_host_keys()
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        with connection:
            result = connection.run(
                command, in_stream=io.StringIO(text), hide=True, warn=True, timeout=timeout, encoding="utf-8"
            )
            return result.exited, result.stdout, result.stderr
    except BadHostKeyException:
        reason = (
            f"{where} shows another host key than the one in known_hosts: it was installed again, or "
            f"someone is in between; when you know which, `ssh-keygen -R {host.address}`"
        )
    except AuthenticationException as error:
        user = host.user or "this user"
        reason = (
            f"{where} refuses to let {user} in ({error}); set ansible_user and "
            "ansible_ssh_private_key_file, or load the key into ssh-agent"
        )
    except NoValidConnectionsError:
        reason = f"{where} refuses connections; is sshd running there, and is ansible_port right?"
    except socket.gaierror:
        reason = f"the name {host.address} cannot be resolved; set ansible_host to its address"
    except TimeoutError:
        reason = (
            f"{where} does not answer within {connect_timeout} s; is the host up, and is a firewall between?"
        )
    except CommandTimedOut:
        reason = f"did not answer within {timeout} s"
    except SSHException as error:
        reason = f"SSH to {where} failed: {error}"
        if "not found in known_hosts" in str(error):
            reason = (
                f"{where} has a host key that is not in known_hosts; check it and connect once with "
                f"`ssh -p {host.port} {host.address}`"
            )
    except (OSError, EOFError, threading.ThreadError) as error:
        reason = f"the connection to {where} failed: {error or type(error).__name__}"
    raise HostError(host.name, reason)
