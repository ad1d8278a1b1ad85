"""KV of workers of any shape: every decode rank ends up with the bytes that one rank would have held."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from tests.kv_bytes import kv_bytes
from tests.kv_transfer.ranks import RankedWorker, ranked_worker
from tests.kv_transfer.workers import SENDER_ID
from tests.patience import PATIENCE_S
from twinpool.core.layout import COMPACT, DTYPE_BYTES, KVLayout, wire_bytes
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVRange
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.wire_format import decode, encode

NUM_LAYERS, HEAD_DIM = 2, 6
TP_SIZES, BLOCK_TOKENS, KV_HEADS, DTYPES = (
    (1, 2, 3, 4, 6, 8),
    (1, 4, 5, 16),
    (1, 2, 3, 4, 8),
    tuple(DTYPE_BYTES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two workers, and a prompt."""

    source_tp: int
    target_tp: int
    num_kv_heads: int = 4
    source_block_tokens: int = 4
    target_block_tokens: int = 16
    source_dtype: str = "float32"
    target_dtype: str = "float32"
    compact: bool = False
    num_tokens: int = 37
    cached_tokens: int = 0
    message_bytes: int = 500
    chunks: tuple[int, ...] = (9, 30)  # how many tokens are computed when ``written`` is called

    @property
    def source(self) -> KVLayout:
        return self._layout(self.source_tp, self.source_block_tokens, self.source_dtype)

    @property
    def target(self) -> KVLayout:
        return self._layout(self.target_tp, self.target_block_tokens, self.target_dtype)

    @property
    def wire(self) -> str:
        """The narrower dtype, the sender's if they are alike."""
        if self.compact:
            return COMPACT
        narrower = DTYPE_BYTES[self.target_dtype] < DTYPE_BYTES[self.source_dtype]
        return self.target_dtype if narrower else self.source_dtype

    def _layout(self, tp_size: int, block_tokens: int, dtype: str) -> KVLayout:
        return KVLayout(
            num_layers=NUM_LAYERS,
            num_kv_heads=self.num_kv_heads,
            head_dim=HEAD_DIM,
            block_tokens=block_tokens,
            dtype=dtype,
            tp_size=tp_size,
        )


def divides(num_kv_heads: int, tp_size: int) -> bool:
    return num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0


def shuffled_blocks(layout: KVLayout, num_tokens: int, rng: random.Random) -> tuple[tuple[int, ...], int]:
    """Return blocks for a sequence in no order, with gaps, and how many there are in the pool."""
    needed = layout.num_blocks(num_tokens)
    return tuple(rng.sample(range(2 * needed), needed)), 2 * needed


def random_kv(case: Case) -> list[Tensor]:
    """Per layer [2, T, K, D] in the source's dtype."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, case.num_tokens, case.num_kv_heads, HEAD_DIM)
    dtype = getattr(torch, case.source_dtype)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(NUM_LAYERS)]


def put(cache: KVCache, kv: list[Tensor], blocks: tuple[int, ...]) -> None:
    """Write a rank's heads of every layer."""
    for layer, values in enumerate(kv):
        own = values[:, :, cache.heads.start : cache.heads.stop].contiguous()
        part = KVRange(
            layer=layer, blocks=blocks, first_token=0, num_tokens=values.shape[1], heads=cache.heads
        )
        data = memoryview(own.view(torch.uint8).numpy()).cast("B")
        cache.write(HostPayload([data]), part, wire=cache.layout.dtype)


def travelled(values: Tensor, case: Case) -> Tensor:
    """What [2, T, K, D] become on the way from one rank to one rank."""
    dtype = getattr(torch, case.target_dtype)
    if case.compact:
        return decode(encode(values, COMPACT), COMPACT, shape=tuple(values.shape), dtype=dtype)
    return values.to(getattr(torch, case.wire)).to(dtype)


async def send(case: Case) -> None:
    rng = random.Random(repr(case))
    source_blocks, source_size = shuffled_blocks(case.source, case.num_tokens, rng)
    target_blocks, target_size = shuffled_blocks(case.target, case.num_tokens, rng)
    config = TransferConfig(message_bytes=case.message_bytes, convert_dtypes=True, compact=case.compact)
    kv, hub = random_kv(case), Hub()
    async with (
        ranked_worker(
            case.source,
            config,
            hub=hub,
            make_store=lambda layout, rank: KVCache(layout, source_size, "cpu", rank=rank),
            worker_id=SENDER_ID,
        ) as prefill,
        ranked_worker(
            case.target,
            config,
            hub=hub,
            make_store=lambda layout, rank: KVCache(layout, target_size, "cpu", rank=rank),
            worker_id="decode",
        ) as decode,
    ):
        for cache in prefill.stores:
            put(cache, kv, source_blocks)
        ticket = await decode.expect(
            blocks=target_blocks, num_tokens=case.num_tokens, cached_tokens=case.cached_tokens
        )
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        for num_tokens in (*case.chunks, case.num_tokens):
            prefill.written(transfer, min(num_tokens, case.num_tokens), source_blocks)
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await decode.receiving.wait(ticket.transfer_id, ticket.epoch)
            await transfer.wait()
        report = await decode.receiving.cancel(ticket.transfer_id)

        check_bytes(case, decode, kv, target_blocks)
        assert report.kv_bytes == prefill.counters()["kv_sent_bytes"] == bytes_needed(case)
        assert decode.counters()["kv_received_duplicates"] == 0
        assert prefill.is_idle and decode.is_idle


def check_bytes(case: Case, decode: RankedWorker[KVCache], kv: list[Tensor], blocks: tuple[int, ...]) -> None:
    """Compare every rank's heads, and see that the cached tokens were not touched."""
    for layer, values in enumerate(kv):
        expected = travelled(values, case)
        expected[:, : case.cached_tokens] = 0.0
        for cache in decode.stores:
            own = expected[:, :, cache.heads.start : cache.heads.stop].contiguous()
            held = kv_bytes(cache, layer=layer, blocks=blocks, num_tokens=case.num_tokens)
            assert held == own.view(torch.uint8).numpy().tobytes(), f"layer {layer}, heads {cache.heads}"


def bytes_needed(case: Case) -> int:
    """Each decode rank's heads once, whatever the number of prefill ranks."""
    tokens = case.num_tokens - case.cached_tokens
    heads = case.target_tp * case.target.heads_per_rank
    return NUM_LAYERS * wire_bytes(case.wire, num_tokens=tokens, num_heads=heads, head_dim=HEAD_DIM)


@pytest.mark.parametrize(("source_tp", "target_tp"), list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_any_ranks_to_any_ranks(source_tp: int, target_tp: int) -> None:
    asyncio.run(send(Case(source_tp=source_tp, target_tp=target_tp)))


@pytest.mark.parametrize(("source_tp", "target_tp"), [(3, 1), (1, 3), (3, 3), (6, 3), (3, 6)])
def test_ranks_that_are_no_power_of_two(source_tp: int, target_tp: int) -> None:
    asyncio.run(send(Case(source_tp=source_tp, target_tp=target_tp, num_kv_heads=3)))


@pytest.mark.parametrize(("source_dtype", "target_dtype"), list(itertools.product(DTYPES, repeat=2)))
@pytest.mark.parametrize("compact", [False, True])
def test_any_dtype_to_any_dtype(source_dtype: str, target_dtype: str, compact: bool) -> None:
    case = Case(
        source_tp=2, target_tp=4, source_dtype=source_dtype, target_dtype=target_dtype, compact=compact
    )

    asyncio.run(send(case))
    asyncio.run(send(replace(case, source_tp=4, target_tp=2, target_block_tokens=5)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.sampled_from(KV_HEADS))
    tp_sizes = st.sampled_from([tp for tp in TP_SIZES if divides(num_kv_heads, tp)])
    num_tokens = draw(st.integers(1, 70))
    return Case(
        source_tp=draw(tp_sizes),
        target_tp=draw(tp_sizes),
        num_kv_heads=num_kv_heads,
        source_block_tokens=draw(st.sampled_from(BLOCK_TOKENS)),
        target_block_tokens=draw(st.sampled_from(BLOCK_TOKENS)),
        source_dtype=draw(st.sampled_from(DTYPES)),
        target_dtype=draw(st.sampled_from(DTYPES)),
        compact=draw(st.booleans()),
        num_tokens=num_tokens,
        cached_tokens=draw(st.integers(0, num_tokens)),
        message_bytes=draw(st.sampled_from((1, 200, 10_000))),
        chunks=tuple(sorted(draw(st.lists(st.integers(1, num_tokens), max_size=4)))),
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases())
def test_any_case(case: Case) -> None:
    asyncio.run(send(case))


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, derandomize=True)
@given(cases())
def test_many_cases(case: Case) -> None:
    asyncio.run(send(case))


SHAPES = [
    (source_tp, target_tp, num_kv_heads)
    for source_tp, target_tp, num_kv_heads in itertools.product(TP_SIZES, TP_SIZES, KV_HEADS)
    if divides(num_kv_heads, source_tp) and divides(num_kv_heads, target_tp)
]


@pytest.mark.slow
@pytest.mark.parametrize(("source_tp", "target_tp", "num_kv_heads"), SHAPES)
def test_all_shapes_with_all_blocks(source_tp: int, target_tp: int, num_kv_heads: int) -> None:
    for source_block_tokens, target_block_tokens in itertools.product(BLOCK_TOKENS, repeat=2):
        case = Case(
            source_tp=source_tp,
            target_tp=target_tp,
            num_kv_heads=num_kv_heads,
            source_block_tokens=source_block_tokens,
            target_block_tokens=target_block_tokens,
        )
        asyncio.run(send(case))
