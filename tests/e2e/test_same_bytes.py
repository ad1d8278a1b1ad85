"""The KV a decode worker decodes from is, byte for byte, the KV its prefill worker computed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from router.config import Fallback, RouterConfig
from tests.checkpoints_toy import make_checkpoint
from tests.kv_bytes import kv_bytes
from tests.system import System, system
from tests.toys import request
from twinpool.core.errors import TransferDamaged
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVPayload, KVRange
from twinpool.engine.config import EngineConfig
from twinpool.engine.kv_cache import KVCache

PROMPT = tuple(range(1, 70))  # 69 tokens: not a multiple of any block size used here


class RememberingCache(KVCache):
    """A cache that remembers from and into which blocks transfers went, and can damage what it gives out."""

    last_blocks: tuple[int, ...] = ()
    damaged_layer: int | None = None

    def payload(self, part: KVRange, *, wire: str, on_device: bool = False) -> KVPayload:
        self.last_blocks = tuple(part.blocks)
        data = bytearray().join(super().payload(part, wire=wire).views())
        if part.layer == self.damaged_layer:
            data[len(data) // 2] ^= 1
        return HostPayload([memoryview(data)])

    def write(self, payload: KVPayload, part: KVRange, *, wire: str) -> None:
        self.last_blocks = tuple(part.blocks)
        super().write(payload, part, wire=wire)

    def bytes_of(self, num_tokens: int) -> list[bytes]:
        """Return the KV of the last sequence that moved, by layer."""
        return [
            kv_bytes(self, layer=layer, blocks=self.last_blocks, num_tokens=num_tokens)
            for layer in range(self.layout.num_layers)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=5)


@pytest.mark.parametrize("transport", ["loopback", "grpc"])
@pytest.mark.parametrize(
    ("chunk_tokens", "block_tokens"), [(0, 16), (7, 8), (16, 16), (17, 32), (32, 8)], ids=str
)
def test_kv_on_the_decode_side_is_byte_equal(
    folder: Path, transport: str, chunk_tokens: int, block_tokens: int
) -> None:
    async def scenario() -> None:
        config = EngineConfig(block_tokens=block_tokens, max_chunk_tokens=chunk_tokens)
        async with system(
            folder, prefill=1, decode=1, transport=transport, engine=config, cache_type=RememberingCache
        ) as pair:
            await pair.answer(request(PROMPT, max_tokens=3, ignore_eos=True))
            sent, received = _caches(pair)

            assert sent.bytes_of(len(PROMPT)) == received.bytes_of(len(PROMPT))
            assert sum(map(len, received.bytes_of(len(PROMPT)))) == len(PROMPT) * sent.layout.token_bytes
            assert any(any(layer) for layer in received.bytes_of(len(PROMPT)))

    asyncio.run(scenario())


def test_the_byte_comparison_sees_one_flipped_bit(folder: Path) -> None:
    """The comparison above can fail: damage a layer on its way while the checksum is off."""

    async def scenario() -> None:
        transfer = TransferConfig(checksum=False)
        async with system(
            folder, prefill=1, decode=1, transfer=transfer, cache_type=RememberingCache
        ) as pair:
            sent, received = _caches(pair)
            sent.damaged_layer = 1
            await pair.answer(request(PROMPT, max_tokens=3, ignore_eos=True))

            mine, theirs = sent.bytes_of(len(PROMPT)), received.bytes_of(len(PROMPT))
            assert mine[0] == theirs[0]
            assert mine[1] != theirs[1]

    asyncio.run(scenario())


def test_damage_on_the_wire_is_noticed_and_never_decoded(folder: Path) -> None:
    """With the checksum on, a frame that differs from its checksum ends the transfer, every time."""

    async def scenario() -> None:
        only_pairs = RouterConfig(fallback=Fallback.REFUSE)
        async with system(folder, prefill=1, decode=1, router=only_pairs) as pair:
            decode = pair.workers[1]
            original = decode.receiver.accept

            def accept_damaged(frame: Frame) -> None:
                payload = bytearray(frame.payload.views()[0])
                payload[0] ^= 1
                rest = frame.payload.views()[1:]
                original(replace(frame, payload=HostPayload([memoryview(payload), *rest])))

            decode.receiver.accept = accept_damaged  # type: ignore[method-assign]
            # Each attempt may give its first token, so the answer must be longer than there are attempts.
            with pytest.raises(TransferDamaged, match="wrong checksum"):
                await pair.answer(request(PROMPT, max_tokens=9, ignore_eos=True))
            assert decode.receiver.counters.checksum_failures == pair.router.config.max_attempts
            del decode.receiver.accept  # type: ignore[attr-defined]

            assert len(await pair.answer(request(PROMPT, max_tokens=3, ignore_eos=True))) == 3
            assert (await pair.settled())["ok"]

    asyncio.run(scenario())


def _caches(pair: System) -> tuple[RememberingCache, RememberingCache]:
    sent, received = (worker.cache for worker in pair.workers)
    assert isinstance(sent, RememberingCache) and isinstance(received, RememberingCache)
    return sent, received
