"""x-twinpool-path: how each answer was made and what happened, on every kind of answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from router.config import OnTransferFailure, RouterConfig
from router.http.path_header import path_header
from tests.router_http.toys import DISAGGREGATED, Reply, Site
from twinpool.core.clock import ManualClock
from twinpool.core.errors import ServingError, TransferDamaged, TransferTimeout, WorkerLost
from twinpool.core.ports import WorkerInfo
from twinpool.core.timeline import RequestTimeline

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
}
RETRY, RECOMPUTE, FAIL = OnTransferFailure


@contextmanager
def site_of(
    policy: OnTransferFailure = RETRY, workers: Sequence[WorkerInfo] = DISAGGREGATED
) -> Iterator[Site]:
    site = Site(router_config=RouterConfig(on_transfer_failure=policy, queue_timeout_s=0.2), workers=workers)
    try:
        yield site
    finally:
        site.close()


def ask(site: Site, endpoint: str, *, stream: bool, **body: Any) -> Reply:
    return site.post(endpoint, {**BODIES[endpoint], "stream": stream, **body})


def told(reply: Reply) -> str:
    return reply.headers["x-twinpool-path"]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_trouble_says_its_path_alone(endpoint: str, stream: bool) -> None:
    with site_of() as site:
        assert told(ask(site, endpoint, stream=stream)) == "disaggregated"
    with site_of(workers=DISAGGREGATED[1:]) as site:
        assert told(ask(site, endpoint, stream=stream)) == "local; fallback=no_prefill_worker"


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("policy", "header"),
    [
        (RETRY, "local; retried=TransferDamaged; fallback=prefill_failed"),
        (RECOMPUTE, "local; recomputed=TransferDamaged"),
    ],
)
def test_an_answer_whose_transfer_failed_says_so(
    endpoint: str, policy: OnTransferFailure, header: str
) -> None:
    with site_of(policy) as site:
        site.worker.resume_errors = [TransferDamaged("frame 3")]
        whole = ask(site, endpoint, stream=False)
        site.worker.prefill_errors = [TransferDamaged("frame 3")]
        stream = ask(site, endpoint, stream=True)

    assert (whole.status, stream.status) == (200, 200)
    assert (told(whole), told(stream)) == (header, header)
    assert "[DONE]" in stream.events


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_the_header_of_a_stream_says_what_was_known_at_its_first_token(endpoint: str) -> None:
    with site_of(RECOMPUTE) as site:
        site.worker.resume_errors = [TransferTimeout("late")]
        stream = ask(site, endpoint, stream=True)
        story = site.request("GET", f"/admin/requests/{stream.headers['x-request-id']}").json

    assert told(stream) == "disaggregated"
    assert stream.events[-1] == "[DONE]"
    assert [(event["name"], event.get("reason")) for event in story["events"]] == [
        ("first_token", None),
        ("transfer_failed", "TransferTimeout"),
        ("retry", "TransferTimeout"),
        ("recompute", "TransferTimeout"),
    ]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (TransferDamaged("of a customer"), 502, "transfer_failed"),
        (TransferTimeout("late"), 504, "transfer_timeout"),
    ],
)
def test_a_failed_transfer_that_may_not_be_repaired_is_a_typed_error(
    endpoint: str, error: ServingError, status: int, code: str
) -> None:
    header = f"disaggregated; failed={type(error).__name__}"
    with site_of(FAIL) as site:
        site.worker.resume_errors = [error]
        whole = ask(site, endpoint, stream=False)
        site.worker.prefill_errors = [error]
        early = ask(site, endpoint, stream=True)
        site.worker.resume_errors = [error]
        late = ask(site, endpoint, stream=True)
        after = ask(site, endpoint, stream=False)

    for refusal in (whole, early):
        assert (refusal.status, refusal.json["error"]["code"]) == (status, code)
        assert told(refusal) == header
    assert (late.status, told(late)) == (200, "disaggregated")
    assert late.events[-1]["error"]["code"] == code
    assert b"customer" not in whole.body + early.body + late.body
    assert (after.status, told(after)) == (200, "disaggregated")


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_an_answer_that_met_no_worker_has_no_path(site: Site, endpoint: str) -> None:
    assert "x-twinpool-path" not in ask(site, endpoint, stream=False, temperature=-1).headers
    with site_of(workers=DISAGGREGATED[:1]) as lonely:
        refusal = ask(lonely, endpoint, stream=False)
    assert refusal.status == 503
    assert "x-twinpool-path" not in refusal.headers


def test_the_pairs_of_a_site_and_their_transports_are_shown() -> None:
    with site_of(FAIL) as site:
        ask(site, COMPLETIONS, stream=False)
        ask(site, CHAT, stream=True)
        site.worker.resume_errors = [TransferTimeout("late")]
        ask(site, CHAT, stream=False)
        prefill, decode = site.request("GET", "/admin/workers").json
        metrics = site.request("GET", "/metrics").body.decode()

    assert prefill["received_from"] == {}
    assert decode["received_from"] == {
        "p0": {"transport": "shm", "transfers": {"shm": 3}, "failures": {"TransferTimeout": 1}}
    }
    assert 'twinpool_transfers_total{transport="shm"} 3.0' in metrics
    assert 'twinpool_transfer_failures_total{policy="fail",reason="TransferTimeout"} 1.0' in metrics


def timeline(path: str | None, *events: tuple[str, str]) -> RequestTimeline:
    made = RequestTimeline("r0", ManualClock())
    made.path = path
    for name, reason in events:
        made.event(name, reason=reason)
    return made


@pytest.mark.parametrize(
    ("events", "error", "header"),
    [
        ((), None, "disaggregated"),
        ((("retry", "WorkerLost"), ("retry", "TransferTimeout")), None,
         "disaggregated; retried=WorkerLost; retried=TransferTimeout"),
        ((("retry", "WorkerLost"), ("retry", "WorkerLost")), None, "disaggregated; retried=WorkerLost"),
        ((("retry", "TransferTimeout"), ("recompute", "TransferTimeout"), ("retry", "WorkerLost")), None,
         "disaggregated; recomputed=TransferTimeout; retried=WorkerLost"),
        ((("retry", "WorkerLost"), ("fallback", "no_prefill_worker")), WorkerLost("d0", "died"),
         "disaggregated; retried=WorkerLost; fallback=no_prefill_worker; failed=WorkerLost"),
        ((("first_token", ""), ("transfer_failed", "TransferTimeout")), None, "disaggregated"),
    ],
)  # fmt: skip
def test_notes_stand_in_the_order_in_which_they_came_true(
    events: tuple[tuple[str, str], ...], error: ServingError | None, header: str
) -> None:
    assert path_header([timeline("disaggregated", *events)], error=error) == header


def test_of_several_choices_the_first_that_was_placed_speaks() -> None:
    placed, later = timeline("local", ("fallback", "prefill_failed")), timeline("disaggregated")

    assert path_header([timeline(None), placed, later], error=None) == "local; fallback=prefill_failed"
    assert path_header([timeline(None)], error=WorkerLost("d0", "died")) is None
