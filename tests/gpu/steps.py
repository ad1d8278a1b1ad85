"""What is checked on a GPU: each step raises, or returns what it found; a step that cannot run here says why.

Every step takes the device, so that all of them can be rehearsed on a CPU.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kv_transfer.group import SenderGroup
from kv_transfer.registry import unavailable
from tests.checkpoints_toy import make_checkpoint
from tests.engine.runs import Bench
from tests.gpu import peer
from tests.gpu.peer import LAYOUT
from tests.kv_transfer.workers import SENDER_ID
from twinpool.core.device_checksum import device_checksum
from twinpool.core.errors import TransferError
from twinpool.core.layout import WIRE_FORMATS, KVLayout, wire_bytes
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVRange
from twinpool.core.ticket import KVTicket
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import load_model
from twinpool.engine.runner import TorchRunner
from twinpool.pb.types_pb2 import KVTicket as TicketMessage
from twinpool.rpc.codec import ticket_from_pb

_REPOSITORY = Path(__file__).parents[2]
_START_S = 120.0  # of a process that loads torch and meets a GPU
_STEP_S = 120.0
_NUM_TRANSFERS = 6


class Skip(Exception):
    """This machine cannot run the step."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a step has to say."""

    detail: str = ""
    gb_per_s: float | None = None


Step = Callable[[str, int], Found]
"""Takes the device, and the tokens of one transfer."""


def steps(device: str) -> Iterator[tuple[str, Step]]:
    """Give the steps, each with its name."""
    yield "tokens equal those of a CPU", tokens_equal
    yield "KV written and read equals a CPU's", cache_equal
    yield "checksum equals a CPU's", checksum_equal
    yield "bare copy on the device", copy_speed
    for name in ("grpc", "tcp", "shm"):
        yield f"{name}, from a cache on {device} to another process", transfer(name)
    yield "cuda_ipc between two processes on one GPU", transfer("cuda_ipc")
    yield "cuda_ipc survives a killed peer", killed("cuda_ipc")
    yield "torch_dist between two GPUs", transfer("torch_dist", second_device=True)
    yield "torch_dist survives a killed peer", killed("torch_dist", second_device=True)


def tokens_equal(device: str, num_tokens: int) -> Found:
    """Greedy tokens of a toy model are those that a CPU computes, in float32."""
    prompts = [list(range(1, 70)), list(range(100, 117)), [7] * 33]
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "toy", "llama")
        for each in ("cpu", device):
            loaded = load_model(checkpoint, device=each, dtype="float32")
            cache = KVCache(loaded.spec.layout(block_tokens=16), 64, each)
            bench = Bench(loaded, cache, TorchRunner(loaded, cache), list(range(64)))
            answers.append([bench.generate(prompt, chunk=16, max_tokens=16) for prompt in prompts])
    assert answers[0] == answers[1], f"cpu {answers[0]}, {device} {answers[1]}"
    return Found(f"{sum(map(len, answers[0]))} tokens")


def cache_equal(device: str, num_tokens: int) -> Found:
    """Payloads and what is written of them are the same bytes, in all formats and for some of the heads."""
    layout = KVLayout(num_layers=1, num_kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16")
    here, there = KVCache(layout, 8, "cpu"), KVCache(layout, 8, device)
    values = torch.randn((128, 4, 64), generator=torch.Generator().manual_seed(3))
    slots = torch.arange(128)
    for cache, where in ((here, "cpu"), (there, device)):
        own = values.bfloat16().to(where)
        cache.store(0, slots.to(where), own, -own)
    ranges = itertools.product(WIRE_FORMATS, (range(4), range(1, 3)), ((0, 64), (3, 40)), (False, True))
    count = 0
    for wire, heads, (first, length), on_device in ranges:
        part = KVRange(layer=0, blocks=(5, 2, 7, 0), first_token=first, num_tokens=length, heads=heads)
        payloads = [cache.payload(part, wire=wire, on_device=on_device) for cache in (here, there)]
        data = [b"".join(payload.views()) for payload in payloads]
        assert data[0] == data[1], f"{part} in {wire} is another on {device}"
        assert len(data[0]) == wire_bytes(wire, num_tokens=length, num_heads=len(heads), head_dim=64)
        target = replace(part, blocks=(1, 3, 4, 6))
        here.write(HostPayload([memoryview(bytearray(data[0]))]), target, wire=wire)
        there.write(payloads[1], target, wire=wire)
        for side in (0, 1):
            assert torch.equal(here.slots(0)[side], there.slots(0)[side].cpu()), (
                f"{part} in {wire} was written"
            )
        count += 1
    return Found(f"{count} parts")


def checksum_equal(device: str, num_tokens: int) -> Found:
    """The checksum that a GPU computes is the one that a CPU computes."""
    data = torch.randint(0, 256, (2**20 + 13,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    there = data.to(device)
    ranges = [(0, len(data)), (0, 8), (8, 4096), (16, 4099), (3, 1000)]
    for start, end in ranges:
        here, on_device = (device_checksum(each[start:end], b"identity") for each in (data, there))
        assert here == on_device, f"bytes {start} to {end}"
    return Found(f"{len(ranges)} ranges", _speed(lambda: device_checksum(there, b""), len(data), device))


def copy_speed(device: str, num_tokens: int) -> Found:
    """How fast the device copies within itself: what transfers on one GPU are held against."""
    data = torch.zeros(num_tokens * LAYOUT.token_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(data)
    return Found("", _speed(lambda: target.copy_(data), len(data), device))


def transfer(name: str, *, second_device: bool = False) -> Step:
    """Return the step that sends a cache to another process, some times, and compares it there."""

    def step(device: str, num_tokens: int) -> Found:
        there = _second(device) if second_device else device
        _check_available(name, device)
        return asyncio.run(_bounded(_transfer(name, device, there, num_tokens)))

    return step


def killed(name: str, *, second_device: bool = False) -> Step:
    """Return the step that kills the receiver in the middle, and sends to another one afterwards."""

    def step(device: str, num_tokens: int) -> Found:
        there = _second(device) if second_device else device
        _check_available(name, device)
        return asyncio.run(_bounded(_killed(name, device, there, num_tokens)))

    return step


async def _transfer(name: str, device: str, there: str, num_tokens: int) -> Found:
    async with (
        _sender(name, device, num_tokens) as (sender, expected),
        _receiver(name, there, num_tokens) as receiver,
    ):
        seconds = []
        for ticket in receiver.tickets:
            started_s = time.perf_counter()
            await _send(sender, ticket)
            seconds.append(time.perf_counter() - started_s)
            found = await receiver.next_line()
            assert found == expected, f"what came is another: {found}"
    num_bytes = num_tokens * LAYOUT.token_bytes
    return Found(f"{len(seconds)} x {num_bytes / 2**20:.0f} MiB", num_bytes / min(seconds[1:]) / 1e9)


async def _killed(name: str, device: str, there: str, num_tokens: int) -> Found:
    async with _sender(name, device, num_tokens) as (sender, expected):
        async with _receiver(name, there, num_tokens) as receiver:
            await _send(sender, receiver.tickets[0])
            transfer = await sender.begin(receiver.tickets[1], timeout_s=_STEP_S)
            transfer.written(0, num_tokens, range(LAYOUT.num_blocks(num_tokens)))
            receiver.kill()
            started_s = time.perf_counter()
            try:
                await transfer.wait()
            except TransferError:
                noticed_s = time.perf_counter() - started_s
            else:
                raise AssertionError("a transfer to a dead process was confirmed")
        async with _receiver(name, there, num_tokens) as receiver:
            await _send(sender, receiver.tickets[0])
            assert await receiver.next_line() == expected, "what came after the kill is another"
    return Found(f"noticed after {noticed_s:.2f} s")


@asynccontextmanager
async def _sender(name: str, device: str, num_tokens: int) -> AsyncIterator[tuple[SenderGroup, str]]:
    peer.use(device)
    cache, ends = await peer.start(name, device, worker_id=SENDER_ID, num_tokens=num_tokens)
    for layer in range(LAYOUT.num_layers):
        for number, side in enumerate(cache.slots(layer)):
            side.copy_(torch.randn(side.shape, generator=torch.Generator().manual_seed(2 * layer + number)))
    try:
        yield SenderGroup(ends.sender), peer.digest(cache)
    finally:
        await ends.close()


class _Receiver:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.tickets: list[KVTicket] = []
        self._process = process

    async def next_line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


@asynccontextmanager
async def _receiver(name: str, device: str, num_tokens: int) -> AsyncIterator[_Receiver]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", peer.__name__, name, device, str(_NUM_TRANSFERS), str(num_tokens)),
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
        cwd=_REPOSITORY,
    )
    receiver = _Receiver(process)
    try:
        async with asyncio.timeout(_START_S):
            line = await receiver.next_line()
        receiver.tickets = [
            ticket_from_pb(TicketMessage.FromString(bytes.fromhex(each))) for each in line.split()
        ]
        assert receiver.tickets, "the receiver did not start; what it says stands above"
        yield receiver
    finally:
        receiver.kill()
        await process.wait()


async def _send(sender: SenderGroup, ticket: KVTicket) -> None:
    transfer = await sender.begin(ticket, timeout_s=_STEP_S)
    for layer in range(LAYOUT.num_layers):
        transfer.written(layer, ticket.num_tokens, range(LAYOUT.num_blocks(ticket.num_tokens)))
    await transfer.wait()


async def _bounded(step: object) -> Found:
    async with asyncio.timeout(2 * _START_S + _STEP_S):
        found: Found = await step  # type: ignore[misc]
        return found


def _check_available(name: str, device: str) -> None:
    reason = unavailable(name)
    if reason:
        raise Skip(reason)


def _second(device: str) -> str:
    if device == "cpu":
        return device
    if torch.cuda.device_count() < 2:
        raise Skip(f"needs two GPUs, there is {torch.cuda.device_count()}: NCCL refuses two ranks on one")
    return "cuda:1"


def _speed(work: Callable[[], object], num_bytes: int, device: str) -> float:
    """Return the best of ten runs, in GB/s."""
    best_s = float("inf")
    for _ in range(10):
        started_s = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    return num_bytes / best_s / 1e9
