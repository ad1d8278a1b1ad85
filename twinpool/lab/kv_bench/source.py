"""The KV that the prefill peer sends: made up, or a model's after it has read a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from twinpool.core.clock import SystemClock
from twinpool.core.errors import ConfigError
from twinpool.core.request import Request, SamplingParams
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, load_model
from twinpool.engine.loop import EngineLoop
from twinpool.engine.runner import TorchRunner
from twinpool.lab.kv_bench import ranks
from twinpool.lab.kv_bench.probe import Probe
from twinpool.text.tokenizer import Tokenizer

_PREFILL_LIMIT_S = 600.0
_TEXT = "The prefill worker reads the prompt and sends its keys and values while it computes them. "


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Caches of all ranks that hold the KV of one sequence in these blocks."""

    probe: Probe
    caches: Sequence[KVCache]
    blocks: Sequence[int]

    def digests(self) -> dict[int, str]:
        """Return the digest of each head's KV as a transfer leaves it in the dtype of the cache."""
        caches = ranks.as_received(self.probe, self.caches, self.blocks)
        found = ranks.digests(caches, self.blocks, self.probe.num_tokens)
        return {
            head: digest
            for cache, own in zip(caches, found, strict=True)
            for head, digest in zip(cache.heads, own, strict=True)
        }


def made_up(probe: Probe) -> Source:
    """Return random numbers."""
    caches = ranks.make_caches(probe, probe.layout)
    ranks.fill(caches, seed=probe.seed)
    return Source(probe, caches, ranks.blocks_of(probe, seed=probe.seed))


async def of_model(folder: Path, probe: Probe) -> Source:
    """Return the KV of a prompt of as many tokens as ``probe`` says, computed by the engine.

    Args:
        folder: Of the model, whose layout goes before the one of ``probe``.
        probe: Its other settings stay.

    Raises:
        ConfigError: The model cannot be loaded, or reads no such prompt.
    """
    if probe.layout.tp_size > 1:
        raise ConfigError("--tp", "the KV of a model comes from one rank")
    loaded = load_model(folder, device=probe.device)
    layout = loaded.spec.layout(block_tokens=probe.layout.block_tokens)
    probe = replace(probe, layout=layout)
    if probe.num_tokens >= loaded.spec.max_model_tokens:
        raise ConfigError(
            "--tokens",
            f"{probe.num_tokens} are more than the {loaded.spec.max_model_tokens - 1} of the model",
        )
    cache = ranks.make_caches(probe, layout)[0]
    return Source(probe, [cache], await _prefill(loaded, cache, _prompt_ids(folder, probe.num_tokens)))


def _prompt_ids(folder: Path, num_tokens: int) -> tuple[int, ...]:
    tokenizer, text = Tokenizer.load(folder), _TEXT
    while len(ids := tokenizer.encode(text, add_special_tokens=True)) < num_tokens:
        text += text
    return tuple(ids[:num_tokens])


async def _prefill(loaded: LoadedModel, cache: KVCache, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the prompt as for a transfer and return the blocks that hold its KV."""
    spec, clock = loaded.spec, SystemClock()
    limits = EngineLimits(
        num_blocks=cache.num_blocks,
        max_model_tokens=spec.max_model_tokens,
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(spec.eos_ids),
    )
    config = EngineConfig(block_tokens=cache.layout.block_tokens)
    loop = EngineLoop(Engine(TorchRunner(loaded, cache), config=config, limits=limits, clock=clock), clock)
    await loop.start()
    try:
        request = Request(
            request_id="kv-bench",
            prompt_ids=prompt_ids,
            sampling=SamplingParams(seed=0, max_tokens=2, temperature=0.0),
            timeout_s=_PREFILL_LIMIT_S,
        )
        handle = await loop.submit(request, on_written=lambda layer, num_tokens: None)
        async with asyncio.timeout(_PREFILL_LIMIT_S), aclosing(handle.outputs()) as outputs:
            await anext(outputs)
        return handle.blocks
    finally:
        await loop.close()
