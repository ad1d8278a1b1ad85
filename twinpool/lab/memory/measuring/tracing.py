"""A runner that, once told to, counts what torch allocates in each step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from twinpool.engine.plan import BatchPlan, ItemResult, LayerHook, Runner

_MEMORY = "[memory]"  # what the profiler calls an allocation, or with fewer than 0 bytes the end of one


class TracingRunner:
    """Implements ``Runner`` by another one.

    The profiler takes memory of its own, so a process is either traced or has its resident memory read.

    Attributes:
        peak_bytes: The most that was allocated at once in a traced step, beside what there was before it.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._is_tracing = False
        self.peak_bytes = 0

    def start(self) -> None:
        """Trace every step from now on; in the main thread, as a process must trace there first."""
        with _profile():
            self._is_tracing = True

    def run(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        if not self._is_tracing:
            return self._runner.run(plan, on_layer)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._run_on_gpu(plan, on_layer)
        with _profile() as traced:
            results = self._runner.run(plan, on_layer)
        assert traced.profiler is not None and traced.profiler.kineto_results is not None
        events = [event for event in traced.profiler.kineto_results.events() if event.name() == _MEMORY]
        events.sort(key=lambda event: event.start_ns())
        self.peak_bytes = max(self.peak_bytes, _peak(event.nbytes() for event in events))
        return results

    def _run_on_gpu(self, plan: BatchPlan, on_layer: LayerHook | None) -> tuple[ItemResult, ...]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = self._runner.run(plan, on_layer)
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - before)
        return results


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _peak(changes: Iterable[int]) -> int:
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most
