"""Memory that one process shows to another, with host memory in the place of a GPU's.

Every promise of a transport is kept over it; what CUDA itself does is checked on a GPU (tests/gpu).
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from pathlib import Path

import pytest

from kv_transfer.hub import Hub
from kv_transfer.lanes.cuda_memory import CudaRuntime
from kv_transfer.lanes.ipc import HANDLE_BYTES
from kv_transfer.transports import cuda_ipc
from tests.conformance.test_transports import *  # noqa: F403 - the promises
from tests.kv_transfer import host_memory
from tests.kv_transfer.fake_cuda import compiled
from tests.kv_transfer.receiver_process import CONFIG, NUM_BLOCKS, receiver_process
from tests.kv_transfer.workers import SENDER_ID, Worker, start_worker, write_all
from tests.patience import PATIENCE_S
from twinpool.core.errors import TransferError, TransferTimeout
from twinpool.core.ticket import Endpoint, KVTicket

BLOCKS = tuple(range(NUM_BLOCKS))

pytestmark = pytest.mark.parametrize("name", ["cuda_ipc"])


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "create", host_memory.over_host_memory)


async def send_all(prefill: Worker, ticket: KVTicket) -> None:
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, BLOCKS)
    await transfer.wait()


@pytest.mark.slow
def test_processes_that_die_or_freeze_are_given_up_alone(name: str) -> None:
    module = host_memory.__name__

    async def scenario() -> None:
        prefill = await start_worker(name, CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        async with (
            receiver_process(name, num_transfers=3, module=module) as other,
            receiver_process(name, num_transfers=3, module=module) as frozen,
        ):
            async with receiver_process(name, num_transfers=2, module=module) as decode:
                await send_all(prefill, decode.tickets[0])
                assert await decode.next_line() == "whole"
                transfer = await prefill.sending.begin(decode.tickets[1], timeout_s=PATIENCE_S)
                transfer.written(0, 1024, BLOCKS)
                await decode.kill()
                with pytest.raises(TransferError):
                    await transfer.wait()
            await send_all(prefill, other.tickets[0])
            await send_all(prefill, frozen.tickets[0])
            frozen.stop()
            stuck = asyncio.create_task(send_all(prefill, frozen.tickets[1]))
            async with asyncio.timeout(3.0):
                await send_all(prefill, other.tickets[1])
            with pytest.raises(TransferTimeout):
                await stuck
            frozen.go_on()
            await send_all(prefill, frozen.tickets[2])
        await prefill.close()

    asyncio.run(scenario())


def test_a_peer_on_another_machine_or_in_another_container_is_not_reached(name: str) -> None:
    async def scenario() -> None:
        worker = await start_worker(name, CONFIG, hub=Hub())
        machine, socket_name, identity = worker.transport.endpoint.address.split("/")
        boot, ipc, net, pid = machine.split(".")

        assert worker.transport.reaches(worker.transport.endpoint)
        for elsewhere in (f"{'0' * 32}.{ipc}.{net}.{pid}", f"{boot}.1.{net}.{pid}", f"{boot}.{ipc}.{net}.1"):
            assert not worker.transport.reaches(Endpoint(name, f"{elsewhere}/{socket_name}/{identity}"))
        assert not worker.transport.reaches(Endpoint(name, f"{machine}/{socket_name}/elsewhere"))
        assert not worker.transport.reaches(Endpoint(name, "127.0.0.1:8000"))
        await worker.close()

    asyncio.run(scenario())


def test_python_passes_to_cuda_what_cuda_reads(name: str, tmp_path: Path) -> None:
    runtime = CudaRuntime(compiled(tmp_path, "libcudart.so.13"))
    target = ctypes.create_string_buffer(16)

    shown, handle = runtime.show(4096)
    ctypes.memmove(shown, bytes(range(64)), 64)
    seen = runtime.see(handle)
    runtime.copy(ctypes.addressof(target), seen + 8, 16, stream=0x1234)
    runtime.close(seen)

    assert target.raw == bytes(range(8, 24))
    with pytest.raises(TransferError, match=r"^cudaMalloc: out of memory$"):
        runtime.show(2**31)
    with pytest.raises(TransferError, match=r"^cudaIpcOpenMemHandle: invalid argument$"):
        runtime.see(bytes(HANDLE_BYTES))
    with pytest.raises(TransferError, match=r"^cudaIpcCloseMemHandle: invalid argument$"):
        runtime.close(seen)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_machine_without_a_gpu_says_so(name: str) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("there is a driver")

    assert cuda_ipc.unavailable() == "there is no NVIDIA driver"
