"""`twinpool serve` and `twinpool worker`: from options and file to a config, and on with it."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinpool.cli.options import settings
from twinpool.cluster.config import DeploymentConfig, PoolsConfig, WorkerConfig
from twinpool.core.config import bind, load_yaml, merge, to_yaml, unbind
from twinpool.core.doors import host_of
from twinpool.core.errors import ConfigError
from twinpool.core.open_files import allow_many_files
from twinpool.core.security import SecurityConfig

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_SPLIT, _COLOCATED = ("prefill", "decode"), "colocated"
_COMMON_FILES = {"secret_file": "secret", "tls_ca": "ca.pem"}
_WORKER_FILES = {**_COMMON_FILES, "tls_cert": "worker.pem", "tls_key": "worker.key"}
_SERVER_FILES = {
    **_COMMON_FILES,
    "tls_cert": "router.pem",
    "tls_key": "router.key",
    "worker_tls_cert": "worker.pem",
    "worker_tls_key": "worker.key",
}


def serve(args: argparse.Namespace) -> int:
    """Serve until asked to stop."""
    config = deployment_config(args)
    if args.print_config:
        # Not the key: what is printed is kept in files, and TWINPOOL_API_KEY can stand in.
        print(to_yaml(replace(config, http=replace(config.http, api_key=None))), end="")
        return 0
    from twinpool.cluster.serve import serve as run_server

    allow_many_files()
    _log_to_stderr()
    return run_server(config, say=say, on_ready=lambda url: print(f"ready {url}", flush=True))


def worker(args: argparse.Namespace) -> int:
    """Run one worker until asked to stop."""
    config = worker_config(args)
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    from kv_transfer.nccl import preload
    from twinpool.checkpoints.resolve import resolve_model, served_name
    from twinpool.cluster.child import threads_of
    from twinpool.core.errors import InternalError

    allow_many_files()
    _log_to_stderr()
    folder = resolve_model(config.model, progress=say)
    config = replace(config, model=str(folder), model_name=config.model_name or served_name(config.model))
    # Libraries read it when they are loaded.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of(config)))
    preload(os.environ)
    from twinpool.cluster.failure import describe_failure
    from twinpool.cluster.worker import run_worker

    def report(event: str, text: str) -> None:
        say(f"{config.worker_id}: {text or event}")

    try:
        return run_worker(config, report=report)
    except Exception as error:
        reason = describe_failure(error)
        if reason is None or isinstance(error, ConfigError):
            raise
        raise InternalError(reason) from error


def deployment_config(args: argparse.Namespace) -> DeploymentConfig:
    """Return what `serve` is to do: options over file over defaults.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, or cannot work.
    """
    given, file = settings(args), _file(args)
    key = os.environ.get("TWINPOOL_API_KEY")
    merged = merge({} if key is None else {"http": {"api_key": key}}, file)
    merged = merge(merged, _files_of(args, _SERVER_FILES))
    merged = merge(merged, given)
    # A pool of which the file says one thing keeps its other defaults.
    defaults = {"pools": unbind(PoolsConfig())}
    return bind(DeploymentConfig, merge(defaults, merge(merged, _pools(given, file))))


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """Return what `worker` is to do; an id and a generation of its own are made up.

    Raises:
        ConfigError: As ``deployment_config``; or there is no role, no router, or no host that others reach.
    """
    merged = merge(merge(_file(args), _files_of(args, _WORKER_FILES)), settings(args))
    if merged.get("secret"):
        raise ConfigError("secret", "can be read by others in a file or on a command line; use --secret-file")
    for name in ("role", "join"):
        if name not in merged:
            raise ConfigError(f"--{name}", "is missing")
    made_up = {
        "worker_id": f"{merged['role']}-{socket.gethostname()}-{os.getpid()}",
        "generation": time.time_ns() // 1_000_000,
    }
    config = bind(WorkerConfig, {**made_up, **merged})
    host_of("--join", config.join)
    if config.host in ("0.0.0.0", "::"):
        raise ConfigError("--host", f"{config.host} is no address that the router and other workers reach")
    return config


def worker_security(args: argparse.Namespace) -> SecurityConfig:
    """Return what the options say of secret and certificates, for a process that is no worker of a router.

    Raises:
        ConfigError: They cannot work.
    """
    given = merge(_files_of(args, _WORKER_FILES), settings(args))
    return bind(SecurityConfig, given.get("security", {}), "security")


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"twinpool: {text}", file=sys.stderr, flush=True)


def _file(args: argparse.Namespace) -> Mapping[str, Any]:
    return {} if args.config is None else load_yaml(Path(args.config))


def _files_of(args: argparse.Namespace, names: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the settings that ``--certs`` stands for."""
    if args.certs is None:
        return {}
    return {"security": {setting: str(Path(args.certs) / name) for setting, name in names.items()}}


def _pools(*sources: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settle which kind of pools is meant: what the first source that names workers does.

    Naming workers of one kind means none of the other, unless both are named in the same place.
    """
    for source in sources:
        pools = source.get("pools")
        named = [
            role
            for role, pool in (pools.items() if isinstance(pools, Mapping) else ())
            if isinstance(pool, Mapping) and pool.get("workers")
        ]
        if not named:
            continue
        if named == [_COLOCATED]:
            return {"pools": {role: {"workers": 0} for role in _SPLIT}}
        return {} if _COLOCATED in named else {"pools": {_COLOCATED: {"workers": 0}}}
    return {}


def _log_to_stderr() -> None:
    level = os.environ.get("TWINPOOL_LOG", "INFO")
    if level not in _LOG_LEVELS:
        raise ConfigError("TWINPOOL_LOG", f"{level} is none of {', '.join(_LOG_LEVELS)}")
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
