"""What operators and tools ask has the shapes that tools are written against."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from router.http.config import HTTPConfig
from tests.router_http.toys import DISAGGREGATED, MODEL, Site, worker_info
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role


def test_workers_are_listed(site: Site) -> None:
    (worker,) = site.request("GET", "/admin/workers").json

    assert worker == {
        "id": "c0",
        "role": "colocated",
        "state": "ready",
        "becomes": None,
        "pid": 1234,
        "host": "toy-host",
        "address": "127.0.0.1:1",
        "generation": 1,
        "model": MODEL,
        "transports": ["shm", "grpc"],
        "ranks": [["shm", "grpc"]],
        "dtype": "float32",
        "block_tokens": 16,
        "num_blocks": 1000,
        "fingerprint": {},
        "received_from": {},
        "running": 0,
        "queued": 0,
        "counters": {},
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
        "settings": {},
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


@pytest.fixture
def split_site() -> Iterator[Site]:
    workers = (*DISAGGREGATED, worker_info("d1", Role.DECODE))
    site = Site(HTTPConfig(port=0, api_key="sesame"), workers=workers)
    yield site
    site.close()


KEY = {"authorization": "Bearer sesame"}


def test_a_worker_gets_another_role_and_its_cache_is_cleared(split_site: Site) -> None:
    reply = split_site.post(
        "/admin/workers/d1/role", {"role": "prefill", "timeout_s": 5, "clear_cache": True}, KEY
    )

    assert reply.status == 200
    assert reply.json.pop("took_s") < 5.0
    assert {name: value for name, value in reply.json.items() if name != "took_s"} == {
        "worker": "d1",
        "was": "decode",
        "role": "prefill",
        "moved": 0,
        "freed_blocks": 7,
    }
    assert split_site.worker.roles == [Role.PREFILL]
    found = split_site.request("GET", "/admin/workers", headers=KEY).json
    assert [(worker["id"], worker["role"], worker["becomes"]) for worker in found] == [
        ("p0", "prefill", None),
        ("d0", "decode", None),
        ("d1", "prefill", None),
    ]


def test_every_cache_is_cleared(split_site: Site) -> None:
    reply = split_site.request("POST", "/admin/cache/clear", headers=KEY)

    workers = [{"id": worker_id, "freed_blocks": 7} for worker_id in ("p0", "d0", "d1")]
    assert (reply.status, reply.json) == (200, {"ok": True, "workers": workers})


@pytest.mark.parametrize("path", ["/admin/workers/d1/role", "/admin/cache/clear"])
def test_no_worker_is_changed_without_the_key(split_site: Site, path: str) -> None:
    assert split_site.post(path, {"role": "prefill"}).status == 401
    assert split_site.worker.roles == []


@pytest.mark.parametrize(
    ("worker", "body", "param", "message"),
    [
        ("d7", {"role": "decode"}, "worker", "worker: d7 is not here; the workers are p0, d0, d1"),
        ("d0/x", {"role": "decode"}, "worker", "worker: d0/x is not here; the workers are p0, d0, d1"),
        ("d0", {}, "role", "role: is missing"),
        ("d0", {"role": "boss"}, "role", "role: input should be 'prefill', 'decode' or 'colocated'"),
        ("d0", {"role": "prefill", "timeout_s": 0}, "timeout_s", "timeout_s: input should be greater than 0"),
        ("d0", {"role": "prefill", "timeout": 1}, "timeout", "timeout: extra inputs are not permitted"),
        ("d0", {"role": "prefill", "force": "yes"}, "force", "force: input should be a valid boolean"),
    ],
)
def test_a_change_of_role_with_a_slip_is_refused(
    split_site: Site, worker: str, body: dict[str, object], param: str, message: str
) -> None:
    refusal = split_site.post(f"/admin/workers/{worker}/role", body, KEY)

    assert (refusal.status, refusal.json["error"]["param"]) == (400, param)
    assert refusal.json["error"]["message"] == message
    assert split_site.worker.roles == []


def test_a_page_of_another_site_changes_no_role(site: Site) -> None:
    reply = site.post("/admin/workers/c0/role", {"role": "decode"}, {"origin": "https://evil.example"})

    assert reply.status == 403
    assert site.worker.roles == []
