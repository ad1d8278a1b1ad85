"""What operators and tools ask has the shapes that tools are written against."""

from __future__ import annotations

import logging

import pytest

from router.http.config import HTTPConfig
from tests.router_http.toys import MODEL, Site
from twinpool.core.errors import ConfigError


def test_workers_are_listed(site: Site) -> None:
    (worker,) = site.request("GET", "/admin/workers").json

    assert worker == {
        "id": "c0",
        "role": "colocated",
        "state": "ready",
        "pid": 1234,
        "host": "toy-host",
        "address": "127.0.0.1:1",
        "generation": 1,
        "model": MODEL,
        "transports": ["shm", "grpc"],
        "ranks": [["shm", "grpc"]],
        "dtype": "float32",
        "block_tokens": 16,
        "received_from": {},
        "running": 0,
        "queued": 0,
    }


def test_the_audit_adds_up(site: Site) -> None:
    audit = site.request("GET", "/admin/audit").json

    assert audit["ok"] is True
    assert audit["router"] == {"in_flight": 0, "queued": 0}
    assert audit["workers"][0]["blocks"] == {
        "total": 1000,
        "free": 1000,
        "cached": 0,
        "owned": 0,
        "draining": 0,
    }


def test_an_unknown_request_is_a_404(site: Site) -> None:
    reply = site.request("GET", "/admin/requests/never-seen")

    assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")


def test_a_known_request_has_its_story(site: Site) -> None:
    reply = site.post("/v1/completions", {"prompt": "a", "stream": True, "stop": "ll"})
    story = site.request("GET", f"/admin/requests/{reply.headers['x-request-id']}").json

    assert {
        "id",
        "path",
        "prefill_worker",
        "decode_worker",
        "spans",
        "kv_bytes",
        "cached_tokens",
        "events",
    } <= set(story)
    assert (story["path"], story["prefill_worker"], story["decode_worker"]) == ("colocated", None, "c0")
    assert story["outcome"] == "stop"
    assert [span["name"] for span in story["spans"]] == ["queue", "prefill", "decode"]
    assert all(span["end_s"] >= span["start_s"] for span in story["spans"])


def test_metrics_health_version_and_models(site: Site) -> None:
    site.post("/v1/completions", {"prompt": "a"})

    metrics = site.request("GET", "/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b'twinpool_requests_total{outcome="stop",path="colocated"}' in metrics.body
    assert site.request("GET", "/health").json == {"status": "ok"}
    assert site.request("GET", "/ready").json == {"status": "ready"}
    assert site.request("GET", "/version").json["version"]
    assert site.request("GET", f"/v1/models/{MODEL}").json["id"] == MODEL
    assert site.request("GET", "/v1/models/a/b").json["error"]["code"] == "model_not_found"


def test_what_clients_write_is_never_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    site.worker.error_at, site.worker.error = 0, RuntimeError("about swordfish")

    reply = site.post("/v1/completions", {"prompt": "swordfish", "user": "swordfish"})
    site.post("/v1/completions", {"prompt": "swordfish", "temperature": "swordfish"})

    assert reply.status == 500
    assert "failed: RuntimeError" in caplog.text
    assert "swordfish" not in caplog.text


@pytest.mark.parametrize("needs_prefill", [True, False])
def test_not_ready_says_what_is_missing(needs_prefill: bool) -> None:
    site = Site(HTTPConfig(port=0), workers=(), needs_prefill=needs_prefill)
    try:
        reply = site.request("GET", "/ready")
    finally:
        site.close()

    assert (reply.status, reply.json) == (503, {"status": "not ready", "reasons": ["no worker has joined"]})


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", -1), ("api_key", ""), ("api_key", "caf\u00e9"), ("max_body_bytes", 3), ("keep_alive_s", 0.0)],
)
def test_settings_that_cannot_work_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"http.{field}: "):
        HTTPConfig(**{field: value})  # type: ignore[arg-type]


def test_workers_that_were_started_elsewhere_are_not_ours_to_scale(site: Site) -> None:
    assert site.request("GET", "/admin/deployment").json == {
        "workers": [],
        "ray": "not used",
        "security": "nothing",
    }

    scaled = site.post("/admin/scale", {"prefill": 2})
    replaced = site.post("/admin/replace", {"worker": "w0"})

    assert (scaled.status, replaced.status) == (400, 400)
    assert scaled.json["error"]["message"].endswith("are started and ended elsewhere")
    assert replaced.json["error"]["param"] == "worker"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/admin/scale", {"prefil": 2}, "prefil"),
        ("/admin/scale", {"prefill": -1}, "prefill"),
        ("/admin/scale", {"decode": "2"}, "decode"),
        ("/admin/replace", {}, "worker"),
        ("/admin/replace", {"worker": ""}, "worker"),
    ],
)
def test_an_order_with_a_slip_is_refused(site: Site, path: str, body: dict[str, object], param: str) -> None:
    refusal = site.post(path, body)

    assert refusal.status == 400
    assert refusal.json["error"]["param"] == param
