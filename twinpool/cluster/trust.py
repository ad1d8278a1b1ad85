"""What a process of a deployment proves itself with, read and checked before anything is listened on."""

from __future__ import annotations

import logging
from dataclasses import replace

from twinpool.cluster.config import DeploymentConfig, WorkerConfig
from twinpool.core.doors import check_door, is_loopback
from twinpool.core.errors import ConfigError
from twinpool.core.secret import Secret
from twinpool.core.security import Trust, load_trust
from twinpool.core.tls import Party

_log = logging.getLogger(__name__)


def server_trust(config: DeploymentConfig) -> Trust:
    """Return what a router shows to its workers; without ``secret_file`` its own workers get a random secret.

    Raises:
        ConfigError: A file is missing or does not fit, or others could reach the port where workers join.
    """
    trust = load_trust(config.security, party=Party.ROUTER)
    if not config.without_ray:
        if not trust.secret.is_set:
            trust = replace(trust, secret=Secret.random())
        for name in ("worker_tls_cert", "worker_tls_key") if trust.tls is not None else ():
            if getattr(config.security, name) is None:
                raise ConfigError(
                    f"security.{name}", "is missing: the workers that are started here need one of their own"
                )
    check_door("join_host", config.join_host, trust)
    return trust


def warn_of_open_api(config: DeploymentConfig) -> None:
    """Tell that others than this machine reach the HTTP port, where all can use and scale the deployment.

    Raises:
        ConfigError: The host is unknown.
    """
    if config.http.api_key is None and not is_loopback("--host", config.http.host):
        _log.warning(
            "http.host %s can be reached from other machines and asks for no API key, /admin included",
            config.http.host,
        )


def secret_for_workers(config: DeploymentConfig, trust: Trust) -> str:
    """Return what ``WorkerConfig.secret`` of the workers that a server starts is to be.

    A secret of a file is read from that file by each of them, so that it does not travel through Ray.
    """
    return trust.secret.key.hex() if config.security.secret_file is None else ""


def worker_trust(config: WorkerConfig) -> Trust:
    """Return what a worker shows to its peers; the secret it was handed goes before the file's.

    Raises:
        ConfigError: A file is missing or does not fit, or others could reach a port of the worker.
    """
    handed = Secret(bytes.fromhex(config.secret)) if config.secret else None
    trust = load_trust(config.security, party=Party.WORKER, secret=handed)
    check_door("host", config.host, trust)
    kv_host, names_port, _ = config.transfer.listen.rpartition(":")
    if names_port:  # else it is the address of a transport that stays on this machine, or is refused by all
        check_door("transfer.listen", kv_host, trust)
    return trust
