"""How the commands find their server."""

from __future__ import annotations

import argparse
import os

from twinpool.cluster.api_client import ApiClient

_URL = "http://127.0.0.1:8000"


def client_of(args: argparse.Namespace) -> ApiClient:
    """Return the client that the options, or else the environment, describe.

    Raises:
        ConfigError: The URL is none.
    """
    url = args.url or os.environ.get("TWINPOOL_URL") or _URL
    return ApiClient(url, api_key=api_key_of(args))


def api_key_of(args: argparse.Namespace) -> str | None:
    """Return the key that requests carry, if any."""
    return args.api_key or os.environ.get("TWINPOOL_API_KEY")
