"""What measures and models the rest; the names here are stable and load what they need when first used."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

_HOMES = MappingProxyType(
    {
        "BenchConfig": "twinpool.lab.bench.config",
        "BenchResult": "twinpool.lab.bench.result",
        "CalibrateConfig": "twinpool.lab.calibrate.config",
        "Calibration": "twinpool.lab.calibrate.calibration",
        "HeldLoad": "twinpool.lab.memory.worker_plan",
        "Limits": "twinpool.lab.metrics.limits",
        "MemoryPlan": "twinpool.lab.memory.memory_plan",
        "Percentiles": "twinpool.lab.metrics.percentiles",
        "Pool": "twinpool.lab.simulate.config",
        "Profile": "twinpool.lab.profile.profile",
        "RecommendConfig": "twinpool.lab.recommend.config",
        "Recommendation": "twinpool.lab.recommend.recommendation",
        "Record": "twinpool.lab.record",
        "SearchConfig": "twinpool.lab.study.settings",
        "SimulationConfig": "twinpool.lab.simulate.config",
        "SimulationResult": "twinpool.lab.simulate.result",
        "StudyFolder": "twinpool.lab.study.folder",
        "StudySettings": "twinpool.lab.study.settings",
        "Summary": "twinpool.lab.metrics.summary",
        "WorkItem": "twinpool.lab.workload.item",
        "WorkerKind": "twinpool.lab.recommend.config",
        "WorkerShape": "twinpool.lab.memory.worker_plan",
        "Workload": "twinpool.lab.workload.workload",
        "conclude": "twinpool.lab.study.findings.all",
        "calibrate_engine": "twinpool.lab.calibrate.calibration",
        "load_profile": "twinpool.lab.profile.profile",
        "measure_plan": "twinpool.lab.memory.measuring.measure",
        "measure_serving": "twinpool.lab.calibrate.serving",
        "open_workload": "twinpool.lab.workload.workload",
        "parse_layout": "twinpool.lab.simulate.config",
        "plan_memory": "twinpool.lab.memory.memory_plan",
        "read_model": "twinpool.lab.memory.planned_model",
        "read_records": "twinpool.lab.records",
        "recommend_layout": "twinpool.lab.recommend.recommend",
        "run_bench": "twinpool.lab.bench.run",
        "run_bench_async": "twinpool.lab.bench.run",
        "run_simulation": "twinpool.lab.simulate.simulation",
        "run_study": "twinpool.lab.study.run",
        "write_report": "twinpool.lab.study.report",
    }
)

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
