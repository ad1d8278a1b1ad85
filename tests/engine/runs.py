"""Drives a runner by hand, as the engine would: used by the tests of the model part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.toys import request
from twinpool.core.request import Request, TokenLogprob
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, load_model
from twinpool.engine.plan import BatchItem, BatchPlan, ItemResult
from twinpool.engine.runner import TorchRunner


@dataclass
class Sequenced:
    """A sequence that a test moves on itself; fits ``SequenceView``."""

    request: Request
    blocks: Sequence[int]
    num_computed_tokens: int = 0
    arrived_s: float = 0.0
    has_destination: bool = False
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_ids, *self.request.output_ids]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_done(self) -> bool:
        return len(self.output_ids) >= self.request.sampling.max_tokens

    def item(self, *, chunk: int) -> BatchItem:
        num_tokens = min(chunk, self.num_uncomputed_tokens)
        return BatchItem(
            sequence=self,
            first_token=self.num_computed_tokens,
            num_tokens=num_tokens,
            samples=num_tokens == self.num_uncomputed_tokens,
        )

    def commit(self, item: BatchItem, result: ItemResult) -> None:
        assert result.error is None, result.error
        self.num_computed_tokens += item.num_tokens
        self.prompt_logprobs.extend(result.prompt_logprobs)
        if item.samples:
            assert result.token_id is not None
            self.token_ids.append(result.token_id)
            self.logprobs.append(result.logprob)


@dataclass
class Bench:
    """A model, a cache and the blocks not yet given out, in a scattered order."""

    loaded: LoadedModel
    cache: KVCache
    runner: TorchRunner
    free: list[int]

    def sequence(self, prompt_ids: Sequence[int], **fields: object) -> Sequenced:
        made = request(tuple(prompt_ids), **fields)  # type: ignore[arg-type]
        count = self.cache.layout.num_blocks(made.max_total_tokens + 1)
        blocks = tuple(self.free.pop() for _ in range(count))
        return Sequenced(made, blocks)

    def step(self, sequences: Sequence[Sequenced], *, chunk: int) -> tuple[ItemResult, ...]:
        items = tuple(sequence.item(chunk=chunk) for sequence in sequences if not sequence.is_done)
        results = self.runner.run(BatchPlan(items), None)
        for item, result in zip(items, results, strict=True):
            assert isinstance(item.sequence, Sequenced)
            item.sequence.commit(item, result)
        return results

    def finish(self, sequences: Sequence[Sequenced], *, chunk: int) -> None:
        while not all(sequence.is_done for sequence in sequences):
            self.step(sequences, chunk=chunk)

    def generate(self, prompt_ids: Sequence[int], *, chunk: int = 10_000, **fields: object) -> list[int]:
        sequence = self.sequence(prompt_ids, **fields)
        self.finish([sequence], chunk=chunk)
        return sequence.output_ids


def bench(folder: Path, *, block_tokens: int = 16, num_blocks: int = 256, dtype: str = "float32") -> Bench:
    """Load a checkpoint on the CPU and give it a cache."""
    loaded = load_model(folder, device="cpu", dtype=dtype)
    cache = KVCache(loaded.spec.layout(block_tokens=block_tokens), num_blocks, "cpu")
    free = [number * 37 % num_blocks for number in range(num_blocks)]  # neighbours in time lie apart
    return Bench(loaded, cache, TorchRunner(loaded, cache), free)
