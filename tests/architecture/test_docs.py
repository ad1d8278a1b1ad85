"""What the docs list is what the code has: metrics, errors and defaults."""

from __future__ import annotations

import re
from pathlib import Path

from router.config import RouterConfig
from router.http.errors import VERDICTS
from router.metrics import RouterMetrics
from router.workers import WorkerPool
from twinpool.cluster.config import DeploymentConfig
from twinpool.core.clock import SystemClock
from twinpool.core.config import unbind
from twinpool.core.errors import ServingError

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_documented_metrics_are_those_of_the_router() -> None:
    def connect(_: object) -> object:
        raise AssertionError("nobody joins")

    pool = WorkerPool(RouterConfig(), clock=SystemClock(), connect=connect)  # type: ignore[arg-type]
    metrics = RouterMetrics(pool, num_queued=lambda: 0, num_in_flight=lambda: 0)
    table = (DOCS / "api.md").read_text().partition("## Metrics")[2].partition("Totals since")[0]

    shown = {
        family.name + ("_total" if family.type == "counter" else "") for family in metrics.registry.collect()
    }

    assert set(re.findall(r"`(twinpool_\w+)`", table)) == shown


def test_the_documented_errors_are_those_of_the_api() -> None:
    rows = re.findall(r"^\| ([\w, ]+) \| (\d{3}) \| (\w+) \| (\w+) \|", (DOCS / "api.md").read_text(), re.M)

    documented = {
        name: (int(status), kind, code) for names, status, kind, code in rows for name in names.split(", ")
    }

    assert documented == {
        error.__name__: (verdict.status, verdict.type, verdict.code)
        for error, verdict in VERDICTS.items()
        if error is not ServingError
    }


def test_the_documented_defaults_are_those_of_the_settings() -> None:
    defaults = unbind(DeploymentConfig())
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| ([\w.]+) \|", (DOCS / "operations.md").read_text(), re.M)

    documented = {(part, name): value for part, name, value in rows}

    assert len(documented) > 20
    assert documented == {(part, name): _as_written(defaults[part][name]) for part, name in documented}


def _as_written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
