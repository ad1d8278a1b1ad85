"""foreign_page: a browser's page may ask only where it came from, and nobody's name may point here."""

from __future__ import annotations

import pytest

from router.http.same_site import foreign_page


def scope(**headers: str) -> dict[str, object]:
    return {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


@pytest.mark.parametrize(
    ("headers", "listen"),
    [
        ({"host": "127.0.0.1:8000"}, "127.0.0.1"),
        ({"host": "localhost:8000"}, "127.0.0.1"),
        ({"host": "[::1]:8000"}, "::1"),
        ({"host": "localhost"}, "localhost"),
        ({}, "127.0.0.1"),  # HTTP/1.0
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, "127.0.0.1"),
        ({"host": "llm.example:8000"}, "0.0.0.0"),  # not a loopback port: any name may be its own
    ],
)
def test_programs_and_own_pages_may_ask(headers: dict[str, str], listen: str) -> None:
    assert foreign_page(scope(**headers), host=listen) is None


@pytest.mark.parametrize(
    ("headers", "proof"),
    [
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, "origin http://evil.example"),
        ({"host": "127.0.0.1:8000", "origin": "null"}, "origin null"),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, "origin http://127.0.0.1:9000"),
        ({"host": "evil.example:8000"}, "host evil.example:8000"),
        ({"host": "127.0.0.1:8000", "origin": "http://["}, "origin http://["),
        ({"host": "["}, "host ["),
        ({"host": "127.0.0.1.evil.example"}, "host 127.0.0.1.evil.example"),
        ({"host": "evil.example", "origin": "http://evil.example"}, "host evil.example"),
    ],
)
def test_pages_of_others_may_not(headers: dict[str, str], proof: str) -> None:
    assert foreign_page(scope(**headers), host="127.0.0.1") == proof


def test_a_page_elsewhere_may_not_ask_a_port_that_is_open_to_all_either() -> None:
    headers = {"host": "llm.example:8000", "origin": "https://evil.example"}

    assert foreign_page(scope(**headers), host="0.0.0.0") == "origin https://evil.example"
