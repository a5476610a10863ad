"""One command on one host over SSH, through Fabric, with every way it can fail said in words."""

from __future__ import annotations

import logging
import socket
from typing import Any, cast

from provision.errors import HostError
from provision.inventory import Host


def run(host: Host, command: str, text: str, connect_timeout: int, timeout: int) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of ``command`` with ``text`` as its standard input.

    Raises HostError when the host cannot be reached, refuses us, or is not the host that it was.
    """
    where = f"{host.address} port {host.port}"
    connection = _connect(host, where, connect_timeout)
    try:
        # Not Connection.run: Invoke feeds standard input a byte at a time.
        stdin, stdout, stderr = connection.client.exec_command(command, timeout=timeout)
        stdin.write(text)
        stdin.flush()
        stdin.channel.shutdown_write()
        out, err = stdout.read(), stderr.read()
        code = int(stdout.channel.recv_exit_status())
    except TimeoutError:
        raise HostError(host.name, f"did not answer within {timeout} s") from None
    except (OSError, EOFError, _ssh_error()) as error:
        raise HostError(host.name, f"the connection to {where} broke: {_words(error)}") from None
    finally:
        connection.close()
    if code == -1:
        raise HostError(host.name, f"the connection to {where} broke before the command ended")
    return code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def _refused(host: Host, where: str, why: str) -> str:
    return (
        f"{where} refuses to let {host.user or 'this user'} in ({why.rstrip('.')}); set ansible_user and "
        "ansible_ssh_private_key_file, or load the key into ssh-agent"
    )


def _ssh_error() -> type[Exception]:
    from paramiko.ssh_exception import SSHException

    return cast(type[Exception], SSHException)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _connect(host: Host, where: str, timeout: int) -> Any:
    """An open Fabric connection, which honours ~/.ssh/config; HostError says why there is none."""
    import fabric
    import paramiko
    from paramiko.ssh_exception import AuthenticationException, BadHostKeyException, NoValidConnectionsError

    # Paramiko prints tracebacks of its transport thread; everything it knows is in the exception.
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    connection = fabric.Connection(
        host.address,
        user=host.user or None,
        port=host.port,
        connect_timeout=timeout,
        connect_kwargs={"key_filename": host.private_key} if host.private_key else {},
    )
    connection.client.load_system_host_keys()
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
    try:
        connection.open()
        return connection
    except BadHostKeyException:
        reason = (
            f"{where} shows another host key than the one in known_hosts: it was installed again, or "
            f"someone is in between; when you know which, `ssh-keygen -R {host.address}`"
        )
    except AuthenticationException as error:
        reason = _refused(host, where, _words(error))
    except NoValidConnectionsError:
        reason = f"{where} refuses connections; is sshd running there, and is ansible_port right?"
    except socket.gaierror:
        reason = f"the name {host.address} cannot be resolved; set ansible_host to its address"
    except TimeoutError:
        reason = f"{where} does not answer within {timeout} s; is it up, is a firewall between?"
    except _ssh_error() as error:
        reason = f"SSH to {where} failed: {_words(error)}"
        if "encountered" in str(error) and "key, expected" in str(error):
            # After a refused key, Paramiko reads the file as every other kind and reports the last try.
            reason = _refused(host, where, "the key was not accepted")
        if "not found in known_hosts" in str(error):
            reason = (
                f"{where} has a host key that is not in known_hosts; check it and connect once with "
                f"`ssh -p {host.port} {host.address}`"
            )
    except (OSError, EOFError, ValueError) as error:
        reason = f"the connection to {where} failed: {_words(error)}"
    connection.close()
    raise HostError(host.name, reason)
