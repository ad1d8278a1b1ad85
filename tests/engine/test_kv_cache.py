"""KVCache: bytes leave and enter by token position, whatever the block size, and touch nothing else."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import psutil
import pytest
import torch

from tests.toys import layout
from twinpool.core.layout import KVLayout
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


@pytest.mark.parametrize("block_tokens", [1, 3, 8, 16])
def test_any_range_of_any_blocks_reads_as_token_by_token(block_tokens: int) -> None:
    cache = filled(layout(block_tokens=block_tokens))
    rng = random.Random(block_tokens)

    for _ in range(50):
        blocks = rng.sample(range(NUM_BLOCKS), rng.randint(1, NUM_BLOCKS))
        blocks = sorted(blocks) if rng.random() < 0.5 else blocks
        first = rng.randrange(len(blocks) * block_tokens)
        count = rng.randint(1, len(blocks) * block_tokens - first)

        payload = cache.read(layer=1, blocks=blocks, first_token=first, num_tokens=count)

        assert payload.nbytes == count * cache.layout.layer_token_bytes
        assert payload == expected(cache, layer=1, blocks=blocks, first_token=first, num_tokens=count)


@pytest.mark.parametrize(("source_tokens", "target_tokens"), list(itertools.product([3, 8, 16], [3, 8, 16])))
def test_what_is_written_is_read_again_and_all_else_stays(source_tokens: int, target_tokens: int) -> None:
    source = filled(layout(block_tokens=source_tokens))
    target = KVCache(layout(block_tokens=target_tokens), NUM_BLOCKS, "cpu")
    blocks, others = [7, 2, 3, 9, 0, 5, 11], [1, 4, 6, 8, 10]
    for tensor in (*blocks_of(target, 0), *blocks_of(target, 1)):
        tensor.fill_(-1.0)

    payload = source.read(layer=1, blocks=[4, 5, 1, 8, 9], first_token=2, num_tokens=11)
    target.write(payload, layer=1, blocks=blocks, first_token=5, num_tokens=11)

    assert target.read(layer=1, blocks=blocks, first_token=5, num_tokens=11) == payload
    before = target.read(layer=1, blocks=blocks, first_token=0, num_tokens=5)
    behind = target.read(layer=1, blocks=blocks, first_token=16, num_tokens=len(blocks) * target_tokens - 16)
    assert set(np.frombuffer(before, np.float32)) == {-1.0}
    assert set(np.frombuffer(behind, np.float32)) == {-1.0}
    assert all(bool((side[others] == -1.0).all()) for side in blocks_of(target, 1))
    assert all(bool((side == -1.0).all()) for side in blocks_of(target, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_goes_through_bytes(dtype: str) -> None:
    shape = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_tokens=4, dtype=dtype)
    cache = filled(shape)
    keys = blocks_of(cache, 0)[0][5].clone()

    payload = cache.read(layer=0, blocks=[5], first_token=0, num_tokens=4)
    cache.write(payload, layer=0, blocks=[8], first_token=0, num_tokens=4)

    assert payload.nbytes == shape.block_bytes
    assert torch.equal(blocks_of(cache, 0)[0][8], keys)


def test_read_only_bytes_can_be_written() -> None:
    cache = KVCache(layout(), 1, "cpu")
    payload = np.arange(2 * 16 * 8, dtype=np.float32).tobytes()

    cache.write(memoryview(payload), layer=0, blocks=[0], first_token=0, num_tokens=16)

    assert cache.read(layer=0, blocks=[0], first_token=0, num_tokens=16) == payload
    assert blocks_of(cache, 0)[1].flatten().tolist() == list(range(128, 256))


def test_what_was_read_is_a_copy() -> None:
    cache = filled(layout())
    payload = cache.read(layer=0, blocks=[3], first_token=0, num_tokens=16)
    before = payload.tobytes()

    blocks_of(cache, 0)[0].zero_()

    assert payload == before


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
        {"blocks": [0, NUM_BLOCKS]},
        {"blocks": [-1, 0]},
    ],
)
def test_a_range_that_is_not_there_is_our_own_bug(part: dict[str, object]) -> None:
    cache = KVCache(layout(), NUM_BLOCKS, "cpu")
    fields: dict[str, object] = {"layer": 0, "blocks": [0, 1], "first_token": 0, "num_tokens": 1, **part}

    with pytest.raises(AssertionError):
        cache.read(**fields)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        cache.write(memoryview(bytes(64)), **fields)  # type: ignore[arg-type]


def test_a_payload_of_another_size_is_our_own_bug() -> None:
    cache = KVCache(layout(), NUM_BLOCKS, "cpu")

    with pytest.raises(AssertionError, match="65 bytes for 1 tokens, needed are 64"):
        cache.write(memoryview(bytes(65)), layer=0, blocks=[0], first_token=0, num_tokens=1)


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
            assert cache.read(layer=0, blocks=[1, 3], first_token=0, num_tokens=32) == wanted
    finally:
        stop.set()
        thread.join()


def test_a_large_cache_takes_no_memory_before_it_is_used() -> None:
    before = psutil.Process().memory_info().rss

    cache = KVCache(layout(num_kv_heads=8, head_dim=128), 4 * 1024, "cpu")

    size = cache.num_blocks * cache.layout.block_bytes
    assert size == 2**30
    assert psutil.Process().memory_info().rss - before < size / 16
