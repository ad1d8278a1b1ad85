"""With an API key every route but two is closed: the key is asked for before a route is sought."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router.http import app
from router.http.config import HTTPConfig
from tests.router_http.toys import Site

ROUTES = re.findall(r'Route\(\s*"([^"]+)"', Path(app.__file__).read_text())
OPEN = ["/health", "/ready"]
# What other servers have, or had, open.
ELSEWHERE = [
    *("/docs", "/openapi.json", "/redoc", "/static/x", "/favicon.ico", "/server_info", "/get_model_info"),
    *("/flush_cache", "/abort_request", "/pause", "/update_weights", "/load_lora_adapter", "/collective_rpc"),
    *(
        "/api/jobs/",
        "/debug/pprof",
        "/invocations",
        "/ping",
        "/health_generate",
        "/generate",
        "/v1/embeddings",
    ),
    *(
        "/HEALTH",
        "/health/",
        "/health/../admin/workers",
        "/ready/x",
        "//health",
        "/%68ealth/x",
        "/health;x",
        "*",
    ),
]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


def test_the_list_of_routes_is_read_whole() -> None:
    assert len(ROUTES) >= 16
    assert set(OPEN) < set(ROUTES)
    assert "/admin/scale" in ROUTES


@pytest.mark.parametrize("method", METHODS)
def test_without_the_key_nothing_but_health_is_answered(method: str) -> None:
    site = Site(HTTPConfig(port=0, api_key="k1"))
    try:
        paths = [path.partition("{")[0] for path in ROUTES if path not in OPEN] + ELSEWHERE
        answers = {path: site.request(method, path).status for path in paths}
    finally:
        site.close()

    opened = {path: status for path, status in answers.items() if status not in (400, 401)}
    # A trailing slash does not make another path.
    assert opened == ({"/health/": 200} if method in ("GET", "HEAD") else {"/health/": 405})
