"""All that was measured of a machine, and the profile that it makes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from twinpool.checkpoints.resolve import resolve_model
from twinpool.core.errors import ConfigError
from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.calibrate.fit import ServingCosts, fit_serving, fit_times
from twinpool.lab.calibrate.points import StepTiming
from twinpool.lab.calibrate.serving import Served
from twinpool.lab.calibrate.steps import EngineTimes, Progress, measure_steps
from twinpool.lab.calibrate.transfers import TransferTiming, fit_link, measure_transfers
from twinpool.lab.kv_bench.ways import check_names
from twinpool.lab.machine import describe_machine
from twinpool.lab.profile.profile import Link, ModelShape, Profile

UNSTEADY = 0.2  # the middle half of a step's times, as a share of their median


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, with where and when.

    Attributes:
        served: At a server; None: none was asked, and nothing is known but steps and transfers.
        machine: As ``describe_machine`` says.
    """

    config: CalibrateConfig
    engine: EngineTimes
    transfers: tuple[TransferTiming, ...]
    served: Served | None = None
    machine: Mapping[str, Any]

    @property
    def costs(self) -> ServingCosts:
        """What serving adds."""
        if self.served is None:
            return ServingCosts()
        return fit_serving(self.served, fit_times(self.engine.steps).cost_model())

    @property
    def links(self) -> Mapping[str, Link]:
        """The line of each transport that was measured with two sizes or more."""
        timings: dict[str, list[TransferTiming]] = defaultdict(list)
        for timing in self.transfers:
            if not timing.problem:
                timings[timing.transport].append(timing)
        return {name: fit_link(known) for name, known in timings.items() if len(known) > 1}

    @property
    def unsteady_share(self) -> float:
        """Of the steps, those whose times varied by more than ``UNSTEADY``, as beside other programs."""
        return fmean(timing.spread > UNSTEADY for timing in self.engine.steps)

    def step_errors(self) -> list[tuple[StepTiming, float]]:
        """Return how far the fit is from each measured step, checks included: 0.1 is a tenth too long."""
        cost = fit_times(self.engine.steps).cost_model()
        return [(timing, timing.error(cost)) for timing in self.engine.steps]

    def profile(self, *, command: str) -> Profile:
        """Return the profile of a worker.

        Args:
            command: How it was measured, for its source.
        """
        spec, machine, costs = self.engine.spec, self.machine, self.costs
        threads = self.config.num_threads
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        return Profile(
            name=f"{self.config.model} on {machine['processor']}",
            source=self._source(command),
            hardware=f"{machine['processor']}, {machine['cores']} cores, {threads} of them for a worker",
            engine=f"{versions}, Python {machine['python']}, {machine['system']}",
            model=ModelShape(
                name=self.config.model,
                num_layers=spec.num_layers,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                max_tokens=spec.max_model_tokens,
                dtype=spec.dtype,
            ),
            kv_cache_bytes=self.engine.kv_cache_bytes,
            kv_cache_source="as the workers were set",
            measured=fit_times(self.engine.steps, step_s=costs.step_s),
            transfers=self.links,
            hop_s=costs.hop_s,
            slowdown=costs.slowdown,
        )

    def _source(self, command: str) -> str:
        errors = self.step_errors()
        fitted = max(abs(error) for timing, error in errors if not timing.point.is_check)
        checked = [abs(error) for timing, error in errors if timing.point.is_check]
        return (
            f"measured by `{command}` on {self.machine['date']}, load {self.machine['load']} before; medians "
            f"of {self.config.repeats}; the fit is within {fitted:.1%} of the steps that it is made of, and "
            f"{max(checked):.1%} of {len(checked)} others; {self.costs.step_s * 1e3:.2f} ms of serving are "
            f"in each step; {self.unsteady_share:.0%} of the steps varied by more than {UNSTEADY:.0%}"
        )


def calibrate_engine(config: CalibrateConfig, *, progress: Progress = lambda *_: None) -> Calibration:
    """Measure the steps of one worker's engine, and then transfers to another process.

    Nothing of a server is in it; for that, let ``measure_serving`` ask one and ``replace`` ``served``.

    Args:
        config: What, and how often.
        progress: Told of each measurement, before it.

    Raises:
        ConfigError: Something of ``config`` cannot be.
        Unavailable: Something could not be measured.
    """
    try:
        check_names(config.transports)
    except ConfigError as error:
        raise ConfigError("calibrate.transports", error.problem) from None
    machine = describe_machine()
    engine = measure_steps(config, resolve_model(config.model), progress=progress)
    layout = engine.spec.layout(block_tokens=config.engine.block_tokens)
    transfers = asyncio.run(measure_transfers(config, layout, progress=progress))
    return Calibration(config=config, engine=engine, transfers=transfers, machine=machine)
