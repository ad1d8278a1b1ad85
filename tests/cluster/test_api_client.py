"""ApiClient: a server that does not answer is an error, and soon when nothing is generated."""

from __future__ import annotations

import socket

import pytest

from tests.stranger import stranger
from twinpool.cluster import api_client
from twinpool.cluster.api_client import ApiClient
from twinpool.core.errors import ConfigError, Unavailable


def test_a_server_that_stands_still_is_not_waited_for_as_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_client, "_LOOK_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ApiClient(f"http://127.0.0.1:{silent.getsockname()[1]}")

        with pytest.raises(Unavailable, match="does not answer: timed out"):
            client.get("/admin/workers")


def test_where_nothing_listens_it_is_said_what_would() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

    with pytest.raises(Unavailable, match=f"nothing listens at {url}: `twinpool serve` starts a server"):
        ApiClient(url).get("/health")


def test_a_server_of_another_kind_is_an_error() -> None:
    with stranger() as address, pytest.raises(Unavailable, match="does not answer as twinpool does"):
        ApiClient(f"http://{address}").get("/admin/workers")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:x", "http://h:99999", "http://[::1"]
)
def test_what_is_no_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url: .* does not begin with http://HOST:PORT"):
        ApiClient(url)


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="--url: has a name or a password") as caught:
        ApiClient("http://me:secret@127.0.0.1:8000")

    assert "secret" not in str(caught.value)
