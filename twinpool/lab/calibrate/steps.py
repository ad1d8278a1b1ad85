"""Measures steps of the engine as a worker makes them: the real scheduler, block pool and model, no network.

Prompts are computed.  Sequences that decode get room for their KV as those of a decode worker do, and nothing
is written there first: what it says does not change how long attention takes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from twinpool.core.clock import SystemClock
from twinpool.core.errors import ConfigError, Unavailable
from twinpool.core.request import Request, SamplingParams, TokenOutput
from twinpool.core.units import parse_bytes
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, ModelSpec, load_model
from twinpool.engine.memory import default_budget_bytes, num_blocks_for
from twinpool.engine.runner import TorchRunner
from twinpool.engine.sequence import SequenceState
from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.calibrate.points import StepPoint, StepTiming, grid

Progress = Callable[[str, int, int], None]
"""``(what, how many are done, of how many)``; never called while something is measured."""

_TIMEOUT_S = 3600.0
_DECODE_STEPS = 3  # of one measurement: they are short


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """The steps of one worker."""

    spec: ModelSpec
    kv_cache_bytes: int
    steps: tuple[StepTiming, ...]


def measure_steps(config: CalibrateConfig, folder: Path, *, progress: Progress) -> EngineTimes:
    """Measure every step of ``grid(config)`` in this process, which computes nothing else meanwhile.

    All of them take turns, so that what changes slowly on a machine meets them alike.

    Args:
        config: The steps and the engine.
        folder: Of the model.
        progress: Told of each turn.

    Raises:
        ConfigError: The model cannot be loaded, or it or its cache has no room for a step.
        Unavailable: A step failed.
    """
    with _threads(config.num_threads):
        loaded = load_model(folder, device=config.device, dtype=config.dtype)
        layout = loaded.spec.layout(block_tokens=config.engine.block_tokens)
        budget = (
            default_budget_bytes(config.device)
            if config.kv_memory is None
            else parse_bytes(config.kv_memory, field="calibrate.kv_memory")
        )
        cache = KVCache(layout, num_blocks_for(layout, budget), config.device)
        points = grid(config)
        _check_room(config, points, loaded.spec, cache.num_blocks * layout.block_tokens)
        bench = StepBench(loaded, cache, config.engine)
        seconds: dict[StepPoint, list[float]] = {point: [] for point in points}
        for point in (points[0], points[-1]):
            bench.measure(point)  # the first ones take longer
        for turn in range(config.repeats):
            for number, point in enumerate(points):
                progress(f"steps: {point.name}", turn * len(points) + number, config.repeats * len(points))
                seconds[point].append(bench.measure(point))
    return EngineTimes(
        spec=loaded.spec,
        kv_cache_bytes=cache.num_blocks * layout.rank_block_bytes,
        steps=tuple(StepTiming(point=point, seconds=tuple(seconds[point])) for point in points),
    )


class StepBench:
    """One engine whose steps are timed; used by one thread.

    Args:
        loaded: The model.
        cache: Of its layout.
        config: Of the engine.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, config: EngineConfig) -> None:
        spec = loaded.spec
        limits = EngineLimits(
            num_blocks=cache.num_blocks, max_model_tokens=spec.max_model_tokens, vocab_size=spec.vocab_size
        )
        self._engine = Engine(TorchRunner(loaded, cache), config=config, limits=limits, clock=SystemClock())
        self._ids = range(3, spec.sampling_vocab_size)
        self._random = random.Random("calibrate")
        self._prefixes: dict[int, tuple[int, ...]] = {}

    def measure(self, point: StepPoint) -> float:
        """Return how long the step takes, once; of decodes alone, the median of a few that follow each other.

        Raises:
            Unavailable: It failed.
        """
        prefix = self._prefix(point.cached) if point.cached else ()
        sequences = [self._decoding(point.context) for _ in range(point.decodes)]
        try:
            if sequences:
                self._step(point.decodes)
            if not point.prompts:
                return statistics.median(self._step(point.decodes) for _ in range(_DECODE_STEPS))
            prompts = [self._submit(prefix + self._draw(point.tokens)) for _ in range(point.prompts)]
            sequences += prompts
            found = self._engine.counters["prefix_hit_tokens"]
            seconds = self._step(point.prompts + point.decodes)
            found = self._engine.counters["prefix_hit_tokens"] - found
            assert found == point.prompts * point.cached, f"{found} tokens were cached for {point.name}"
            return seconds
        finally:
            for sequence in sequences:
                self._engine.abort(sequence)
            assert not self._engine.num_sequences, "a measurement left sequences behind"

    def _step(self, num_items: int) -> float:
        began_s = time.perf_counter()
        result = self._engine.step()
        seconds = time.perf_counter() - began_s
        if result.failed:
            raise Unavailable(f"a step of {num_items} sequences failed: {result.failed[0][1]}")
        assert result.num_items == num_items, f"a step of {result.num_items}, not {num_items}, sequences"
        return seconds

    def _decoding(self, context: int) -> SequenceState:
        """Return a sequence whose second step from here on attends to ``context`` tokens."""
        sequence = self._engine.reserve(self._request(self._draw(context - 2), max_tokens=_DECODE_STEPS + 3))
        self._engine.arrived(sequence, TokenOutput(index=0, token_id=self._ids[0]))
        return sequence

    def _submit(self, prompt_ids: tuple[int, ...]) -> SequenceState:
        return self._engine.submit(self._request(prompt_ids, max_tokens=1))

    def _prefix(self, num_tokens: int) -> tuple[int, ...]:
        """Return tokens whose KV is in the cache; it is computed again if it had to make room."""
        ids = self._prefixes.setdefault(num_tokens, self._draw(num_tokens))
        self._submit((*ids, self._ids[0]))
        while self._engine.num_sequences:
            self._engine.step()
        return ids

    def _draw(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.choices(self._ids, k=num_tokens))

    def _request(self, prompt_ids: tuple[int, ...], *, max_tokens: int) -> Request:
        sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(request_id="calibrate", prompt_ids=prompt_ids, sampling=sampling, timeout_s=_TIMEOUT_S)


def _check_room(
    config: CalibrateConfig, points: Sequence[StepPoint], spec: ModelSpec, num_tokens: int
) -> None:
    slack = config.engine.block_tokens + _DECODE_STEPS + 3  # what a sequence's last block and its answer take
    longest = max(max(point.cached + point.tokens, point.context) for point in points) + slack
    if longest > spec.max_model_tokens:
        name = "calibrate.contexts" if config.contexts[-1] + slack >= longest else "calibrate.prompts"
        raise ConfigError(
            name, f"{longest} tokens with an answer are more than the model's {spec.max_model_tokens}"
        )
    needed = max(point.num_tokens + (point.prompts + point.decodes) * slack for point in points)
    if needed > num_tokens:
        raise ConfigError("calibrate.kv_memory", f"holds {num_tokens} tokens, and a step needs {needed}")


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let torch compute with so many threads, as a worker does."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
