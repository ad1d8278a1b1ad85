"""What the router counts, in Prometheus' words, with a registry of its own.

Every request that reaches the router is counted exactly once, when it ends, under one outcome; a
token is counted when it is handed to the client's side.  So the sums equal what clients saw, but for the
one token that a prompt without an answer (``max_tokens: 0``) needs and does not show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.workers import WorkerPool
from twinpool.core.ticket import TransferReport
from twinpool.core.timeline import RequestTimeline

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class RouterMetrics:
    """Counters, gauges and histograms of one router.

    Args:
        pool: Whose workers are shown.
        num_queued: Reads how many requests wait now.
        num_in_flight: Reads how many requests run now.
    """

    def __init__(
        self, pool: WorkerPool, *, num_queued: Callable[[], int], num_in_flight: Callable[[], int]
    ) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self._requests = Counter(
            "twinpool_requests", "Requests that ended", ["outcome", "path"], registry=own
        )
        self._prompt_tokens = Counter(
            "twinpool_prompt_tokens", "Prompt tokens of requests that gave a token", registry=own
        )
        self._generated_tokens = Counter(
            "twinpool_generated_tokens", "Tokens generated for clients, shown or not", registry=own
        )
        self._retries = Counter("twinpool_retries", "Attempts after the first", ["reason"], registry=own)
        self._fallbacks = Counter(
            "twinpool_fallbacks", "Prompts computed by a decode worker", ["reason"], registry=own
        )
        self._transfers = Counter(
            "twinpool_transfers", "Transfers that arrived whole", ["transport"], registry=own
        )
        self._transfer_failures = Counter(
            "twinpool_transfer_failures",
            "Transfers that failed, and what was to follow",
            ["policy", "reason"],
            registry=own,
        )
        self._role_changes = Counter(
            "twinpool_role_changes", "Roles that workers were to get", ["role", "outcome"], registry=own
        )
        self._kv_bytes = Counter("twinpool_kv_bytes", "KV payload moved between workers", registry=own)
        self._queue_s = Histogram(
            "twinpool_queue_seconds", "Wait for room, one attempt", buckets=LATENCY_S, registry=own
        )
        self._first_token_s = Histogram(
            "twinpool_time_to_first_token_seconds", "Arrival to first token", buckets=LATENCY_S, registry=own
        )
        self._per_token_s = Histogram(
            "twinpool_time_per_output_token_seconds",
            "Mean time of one token after the first, per finished request",
            buckets=PER_TOKEN_S,
            registry=own,
        )
        self._request_s = Histogram(
            "twinpool_request_seconds", "Arrival to end, finished requests", buckets=LATENCY_S, registry=own
        )
        queued = Gauge("twinpool_queued_requests", "Requests that wait for room", registry=own)
        queued.set_function(num_queued)
        in_flight = Gauge("twinpool_in_flight_requests", "Requests that run", registry=own)
        in_flight.set_function(num_in_flight)
        own.register(_WorkerCollector(pool))

    def render(self) -> bytes:
        """Return everything in the text format of ``CONTENT_TYPE``."""
        return generate_latest(self.registry)

    def add_total(self, name: str, about: str, read: Callable[[], int]) -> None:
        """Show a number that somebody else counts, and that only grows."""
        self.registry.register(_Total(name, about, read))

    def queued(self, wait_s: float) -> None:
        self._queue_s.observe(wait_s)

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def fell_back(self, reason: str) -> None:
        self._fallbacks.labels(reason).inc()

    def moved(self, report: TransferReport) -> None:
        self._kv_bytes.inc(report.kv_bytes)
        if report.transport and report.complete_s is not None:
            self._transfers.labels(report.transport).inc()

    def transfer_failed(self, policy: str, reason: str) -> None:
        self._transfer_failures.labels(policy, reason).inc()

    def role_changed(self, role: str, outcome: str) -> None:
        self._role_changes.labels(role, outcome).inc()

    def first_token(self, *, after_s: float, num_prompt_tokens: int) -> None:
        self._first_token_s.observe(after_s)
        self._prompt_tokens.inc(num_prompt_tokens)

    def token(self) -> None:
        self._generated_tokens.inc()

    def ended(self, timeline: RequestTimeline, *, first_token_s: float | None, num_tokens: int) -> None:
        """Count a request that is over, under ``timeline.outcome``."""
        assert timeline.outcome is not None, "a request ended without an outcome"
        self._requests.labels(timeline.outcome, timeline.path or "none").inc()
        if timeline.outcome in {"stop", "length"}:
            now_s = timeline.now_s()
            self._request_s.observe(now_s)
            if first_token_s is not None and num_tokens > 1:
                self._per_token_s.observe((now_s - first_token_s) / (num_tokens - 1))


class _Total(Collector):
    """A counter that is read when it is asked for."""

    def __init__(self, name: str, about: str, read: Callable[[], int]) -> None:
        self._name = name
        self._about = about
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._about, value=self._read())


class _WorkerCollector(Collector):
    """Shows the members of a pool as they are when somebody looks; one that left is not shown."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        states: dict[tuple[str, str], int] = {}
        for handle in self._pool.handles:
            key = (handle.info.role.value, handle.state.value)
            states[key] = states.get(key, 0) + 1
        workers = GaugeMetricFamily("twinpool_workers", "Workers", labels=["role", "state"])
        for (role, state), number in states.items():
            workers.add_metric([role, state], number)
        yield workers
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        for name in ("running", "queued", "free_blocks"):
            family = GaugeMetricFamily(f"twinpool_worker_{name}", "As the worker says", labels=["worker"])
            for handle in self._pool.handles:
                if handle.load is not None:
                    family.add_metric([handle.worker_id], getattr(handle.load, name))
            yield family
        mine = GaugeMetricFamily(
            "twinpool_worker_in_flight", "Requests this router runs there", labels=["worker"]
        )
        for handle in self._pool.handles:
            mine.add_metric([handle.worker_id], handle.in_flight)
        yield mine

    def _counters(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for handle in self._pool.handles:
            for name, value in ({} if handle.load is None else handle.load.counters).items():
                clean = re.sub(r"[^a-zA-Z0-9_]", "_", name).removesuffix("_total")
                if clean not in families:
                    families[clean] = CounterMetricFamily(
                        f"twinpool_worker_{clean}", "Total since the worker's start", labels=["worker"]
                    )
                families[clean].add_metric([handle.worker_id], value)
        yield from families.values()
