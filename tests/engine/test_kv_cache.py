"""KVCache: bytes leave and enter by token position, whatever the block size, and touch nothing else."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import psutil
import pytest
import torch

from kv_transfer.plan import agreed_wire
from tests.kv_bytes import kv_bytes
from tests.toys import layout
from twinpool.core.layout import DTYPE_BYTES, KVLayout
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVRange
from twinpool.engine.kv_cache import KVCache

NUM_BLOCKS = 12


def filled(shape: KVLayout) -> KVCache:
    """A cache in which every element of a layer is another number."""
    cache = KVCache(shape, NUM_BLOCKS, "cpu")
    for layer in range(shape.num_layers):
        keys, values = cache.slots(layer)
        for side, tensor in enumerate((keys, values)):
            numbers = torch.arange(tensor.numel()).view_as(tensor)
            tensor.copy_(numbers + 10_000 * side + 30_000 * layer)
    return cache


def blocks_of(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, [blocks, block tokens, KV heads, head dim] each; views, not copies."""
    keys, values = (side.unflatten(0, (-1, cache.layout.block_tokens)) for side in cache.slots(layer))
    return keys, values


def expected(cache: KVCache, *, layer: int, blocks: list[int], first_token: int, num_tokens: int) -> bytes:
    """The same bytes gathered token by token."""
    block_tokens = cache.layout.block_tokens
    sides = []
    for side in blocks_of(cache, layer):
        for token in range(first_token, first_token + num_tokens):
            sides.append(side[blocks[token // block_tokens], token % block_tokens])
    return torch.stack(sides).numpy().tobytes()


def write(
    cache: KVCache, data: bytes, *, layer: int, blocks: list[int], first_token: int, num_tokens: int
) -> None:
    """Write bytes in the cache's own dtype."""
    part = KVRange(
        layer=layer, blocks=blocks, first_token=first_token, num_tokens=num_tokens, heads=cache.heads
    )
    cache.write(HostPayload([memoryview(data)]), part, wire=cache.layout.dtype)


@pytest.mark.parametrize("block_tokens", [1, 3, 8, 16])
def test_any_range_of_any_blocks_reads_as_token_by_token(block_tokens: int) -> None:
    cache = filled(layout(block_tokens=block_tokens))
    rng = random.Random(block_tokens)

    for _ in range(50):
        blocks = rng.sample(range(NUM_BLOCKS), rng.randint(1, NUM_BLOCKS))
        blocks = sorted(blocks) if rng.random() < 0.5 else blocks
        first = rng.randrange(len(blocks) * block_tokens)
        count = rng.randint(1, len(blocks) * block_tokens - first)

        payload = kv_bytes(cache, layer=1, blocks=blocks, first_token=first, num_tokens=count)
        part = KVRange(layer=1, blocks=blocks, first_token=first, num_tokens=count, heads=cache.heads)
        copy = bytearray(len(payload))
        cache.payload(part, wire=cache.layout.dtype).copy_into(memoryview(copy))

        assert copy == payload
        assert len(payload) == count * cache.layout.layer_token_bytes
        assert payload == expected(cache, layer=1, blocks=blocks, first_token=first, num_tokens=count)


@pytest.mark.parametrize(("source_tokens", "target_tokens"), list(itertools.product([3, 8, 16], [3, 8, 16])))
def test_what_is_written_is_read_again_and_all_else_stays(source_tokens: int, target_tokens: int) -> None:
    source = filled(layout(block_tokens=source_tokens))
    target = KVCache(layout(block_tokens=target_tokens), NUM_BLOCKS, "cpu")
    blocks, others = [7, 2, 3, 9, 0, 5, 11], [1, 4, 6, 8, 10]
    for tensor in (*blocks_of(target, 0), *blocks_of(target, 1)):
        tensor.fill_(-1.0)

    payload = kv_bytes(source, layer=1, blocks=[4, 5, 1, 8, 9], first_token=2, num_tokens=11)
    write(target, payload, layer=1, blocks=blocks, first_token=5, num_tokens=11)

    assert kv_bytes(target, layer=1, blocks=blocks, first_token=5, num_tokens=11) == payload
    before = kv_bytes(target, layer=1, blocks=blocks, num_tokens=5)
    num_behind = len(blocks) * target_tokens - 16
    behind = kv_bytes(target, layer=1, blocks=blocks, first_token=16, num_tokens=num_behind)
    assert set(np.frombuffer(before, np.float32)) == {-1.0}
    assert set(np.frombuffer(behind, np.float32)) == {-1.0}
    assert all(bool((side[others] == -1.0).all()) for side in blocks_of(target, 1))
    assert all(bool((side == -1.0).all()) for side in blocks_of(target, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_goes_through_bytes(dtype: str) -> None:
    shape = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_tokens=4, dtype=dtype)
    cache = filled(shape)
    keys = blocks_of(cache, 0)[0][5].clone()

    payload = kv_bytes(cache, layer=0, blocks=[5], num_tokens=4)
    write(cache, payload, layer=0, blocks=[8], first_token=0, num_tokens=4)

    assert len(payload) == shape.rank_block_bytes
    assert torch.equal(blocks_of(cache, 0)[0][8], keys)


def test_read_only_bytes_can_be_written() -> None:
    cache = KVCache(layout(), 1, "cpu")
    payload = np.arange(2 * 16 * 8, dtype=np.float32).tobytes()

    write(cache, payload, layer=0, blocks=[0], first_token=0, num_tokens=16)

    assert kv_bytes(cache, layer=0, blocks=[0], num_tokens=16) == payload
    assert blocks_of(cache, 0)[1].flatten().tolist() == list(range(128, 256))


def test_whole_tokens_in_the_own_dtype_are_views_and_cost_no_copy() -> None:
    cache = filled(layout())
    part = KVRange(layer=0, blocks=[3], first_token=0, num_tokens=16, heads=cache.heads)
    payload = cache.payload(part, wire="float32")

    blocks_of(cache, 0)[0].zero_()

    keys, values = payload.views()
    assert not any(keys)
    assert any(values)


FLOATS = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS, FLOATS)))
def test_dtypes_convert_as_torch_rounds_and_what_needs_no_rounding_is_exact(source: str, target: str) -> None:
    dtypes: dict[str, torch.dtype] = {name: getattr(torch, name) for name in FLOATS}
    narrow = agreed_wire(layout(dtype=source), layout(dtype=target), compact=False)
    sender, receiver = (KVCache(layout(dtype=name), NUM_BLOCKS, "cpu") for name in (source, target))
    values = torch.randn(16, 2, 4, generator=torch.Generator().manual_seed(1)).to(dtypes[source])
    sender.store(1, torch.arange(16) + 32, values, -values)
    here, there = (
        KVRange(layer=1, blocks=[block], first_token=0, num_tokens=16, heads=range(2)) for block in (2, 7)
    )

    receiver.write(sender.payload(here, wire=narrow), there, wire=narrow)

    wanted = values.to(dtypes[narrow]).to(dtypes[target])
    assert torch.equal(blocks_of(receiver, 1)[0][7], wanted)
    assert torch.equal(blocks_of(receiver, 1)[1][7], -wanted)
    assert narrow == source or DTYPE_BYTES[narrow] < DTYPE_BYTES[source]


def test_what_float16_cannot_hold_becomes_its_largest_number_and_never_infinite() -> None:
    sender, receiver = KVCache(layout(), 1, "cpu"), KVCache(layout(dtype="float16"), 1, "cpu")
    sender.store(0, torch.tensor([0]), torch.full((1, 2, 4), 1e6), torch.full((1, 2, 4), -1e6))
    part = KVRange(layer=0, blocks=[0], first_token=0, num_tokens=1, heads=range(2))

    receiver.write(sender.payload(part, wire="float16"), part, wire="float16")

    assert set(blocks_of(receiver, 0)[0][0, 0].flatten().tolist()) == {65504.0}
    assert set(blocks_of(receiver, 0)[1][0, 0].flatten().tolist()) == {-65504.0}


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.30), ("bfloat16", 0.55), ("float16", 0.55)])
def test_the_compact_format_is_small_and_off_by_at_most_half_a_step(dtype: str, share: float) -> None:
    shape = layout(dtype=dtype, head_dim=64)
    sender, receiver = KVCache(shape, NUM_BLOCKS, "cpu"), KVCache(shape, NUM_BLOCKS, "cpu")
    generator = torch.Generator().manual_seed(2)
    sizes = torch.logspace(-4, 4, 16)[:, None, None]  # tokens from tiny to huge
    values = (torch.randn(16, 2, 64, generator=generator) * sizes).to(getattr(torch, dtype))
    values[3, 1] = 0.0
    sender.store(0, torch.arange(16), values, values / 2)
    part = KVRange(layer=0, blocks=[0], first_token=0, num_tokens=16, heads=range(2))

    payload = sender.payload(part, wire="int8")
    receiver.write(payload, part, wire="int8")

    assert payload.nbytes <= share * 16 * shape.layer_token_bytes
    for sent, arrived in zip(blocks_of(sender, 0), blocks_of(receiver, 0), strict=True):
        floats = sent[0].float()
        steps = floats.abs().amax(-1, keepdim=True) / 127
        kind = torch.finfo(getattr(torch, dtype))
        rounding = floats.abs() * kind.eps + kind.smallest_normal * kind.eps  # to the cache's own dtype
        assert bool(((floats - arrived[0].float()).abs() <= 0.501 * steps + rounding).all())
        assert not bool(arrived[0][3, 1].count_nonzero())


@pytest.mark.parametrize(("tp_size", "kv_heads"), [(2, 4), (4, 4), (4, 2), (2, 1)])
def test_a_rank_keeps_its_own_heads_and_takes_them_from_a_cache_of_all(tp_size: int, kv_heads: int) -> None:
    whole = filled(layout(num_kv_heads=kv_heads))
    for rank in range(tp_size):
        shape = layout(num_kv_heads=kv_heads, tp_size=tp_size, block_tokens=5)
        cache = KVCache(shape, NUM_BLOCKS, "cpu", rank=rank)
        here = KVRange(layer=1, blocks=[4, 2], first_token=3, num_tokens=20, heads=cache.heads)
        there = KVRange(layer=1, blocks=[1, 9, 0, 3, 5], first_token=3, num_tokens=20, heads=cache.heads)

        cache.write(whole.payload(here, wire="float32"), there, wire="float32")

        for own, all_heads in zip(cache.slots(1), whole.slots(1), strict=True):
            arrived = own.unflatten(0, (-1, 5))[[1, 9, 0, 3, 5]].flatten(0, 1)[3:23]
            sent = all_heads.unflatten(0, (-1, 16))[[4, 2]].flatten(0, 1)[3:23]
            assert torch.equal(arrived, sent[:, cache.heads.start : cache.heads.stop])


def test_tokens_are_stored_in_their_slots() -> None:
    cache = KVCache(layout(), 2, "cpu")
    keys = torch.arange(16, dtype=torch.float32).view(2, 2, 4)

    cache.store(1, torch.tensor([17, 3]), keys, -keys)

    assert torch.equal(blocks_of(cache, 1)[0][1, 1], keys[0])
    assert torch.equal(blocks_of(cache, 1)[1][0, 3], -keys[1])
    assert int(cache.slots(1)[0].count_nonzero()) == 15
    assert int(cache.slots(0)[0].count_nonzero()) == 0


@pytest.mark.parametrize(
    "part",
    [
        {"layer": 2},
        {"layer": -1},
        {"first_token": -1},
        {"first_token": 30, "num_tokens": 3},
        {"num_tokens": 0},
        {"num_tokens": 33},
        {"blocks": [NUM_BLOCKS, 0]},
        {"blocks": [-1, 0]},
    ],
)
def test_a_range_that_is_not_there_is_our_own_bug(part: dict[str, object]) -> None:
    cache = KVCache(layout(), NUM_BLOCKS, "cpu")
    fields: dict[str, object] = {"layer": 0, "blocks": [0, 1], "first_token": 0, "num_tokens": 1, **part}

    with pytest.raises(AssertionError):
        kv_bytes(cache, **fields)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        write(cache, bytes(64), **fields)  # type: ignore[arg-type]


def test_a_payload_of_another_size_is_our_own_bug() -> None:
    cache = KVCache(layout(), NUM_BLOCKS, "cpu")

    with pytest.raises(AssertionError, match="65 bytes came, needed are 64"):
        write(cache, bytes(65), layer=0, blocks=[0], first_token=0, num_tokens=1)


def test_reading_while_another_thread_stores_elsewhere_is_exact() -> None:
    cache = filled(layout(num_kv_heads=4, head_dim=64))
    wanted = expected(cache, layer=0, blocks=[1, 3], first_token=0, num_tokens=32)
    stop = threading.Event()

    def store() -> None:
        slots = torch.arange(64, 128)
        while not stop.is_set():
            cache.store(0, slots, torch.randn(64, 4, 64), torch.randn(64, 4, 64))

    thread = threading.Thread(target=store)
    thread.start()
    try:
        for _ in range(200):
            assert kv_bytes(cache, layer=0, blocks=[1, 3], num_tokens=32) == wanted
    finally:
        stop.set()
        thread.join()


def test_a_large_cache_takes_no_memory_before_it_is_used() -> None:
    before = psutil.Process().memory_info().rss

    cache = KVCache(layout(num_kv_heads=8, head_dim=128), 4 * 1024, "cpu")

    size = cache.num_blocks * cache.layout.rank_block_bytes
    assert size == 2**30
    assert psutil.Process().memory_info().rss - before < size / 16
