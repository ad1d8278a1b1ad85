"""A worker over gRPC: the clients are ports, a cancelled call is an abort, an error ends one call."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.patience import eventually
from tests.rpc.fakes import CALLS, LAST, FakeWorker, Served, served
from tests.rpc.words import AUDIT, LOAD, TICKET
from tests.toys import request
from tests.trust import ROUTER, worker_door
from twinpool.core.clock import SystemClock
from twinpool.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoFreeBlocks,
    ServingError,
    TransferRefused,
    TransferTimeout,
    WorkerLost,
)
from twinpool.core.ports import Role
from twinpool.core.request import TokenLogprob, TokenOutput
from twinpool.core.ticket import TransferReport
from twinpool.pb import types_pb2, worker_pb2
from twinpool.rpc.clients import DecodeClient, WorkerChannel
from twinpool.rpc.limits import KEEPALIVE_S
from twinpool.rpc.server import WorkerServer

FIRST = TokenOutput(index=0, token_id=100)

Call = Callable[[Served], Awaitable[object]]


def raw(channel: grpc.aio.Channel, method: str) -> Any:
    """A call that sends bytes as they are."""
    return channel.unary_unary(f"/twinpool.v1.{method}", None, None)


async def generate(s: Served, *, timeout_s: float = 30.0) -> list[TokenOutput]:
    async with aclosing(s.decode.generate(request(timeout_s=timeout_s))) as outputs:
        return [output async for output in outputs]


async def resume(s: Served, *, timeout_s: float = 30.0) -> list[TokenOutput]:
    ticket = await s.decode.reserve(request(timeout_s=timeout_s), sender_id="prefill-0")
    async with aclosing(s.decode.resume(ticket, FIRST)) as outputs:
        return [output async for output in outputs]


def test_each_call_arrives_and_its_answer_comes_back() -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.load = LOAD
            assert await s.prefill.prefill(request(), TICKET) == s.worker.outputs[0]
            assert await s.prefill.prefill(request(max_tokens=1), None) == s.worker.outputs[0]
            assert await s.decode.reserve(request(), sender_id="prefill-0") == TICKET
            assert await resume(s) == list(s.worker.outputs[1:])
            assert await generate(s) == list(s.worker.outputs)
            assert await s.decode.release(TICKET) == TransferReport(
                kv_bytes=5, complete_s=0.25, transport="grpc"
            )
            assert await s.control.status() == LOAD
            assert await s.control.drain(timeout_s=2.5) is True
            assert await s.control.audit() == AUDIT
            assert await s.control.clear_cache() == 11
            await s.control.assign(Role.PREFILL)
            assert s.worker.tickets == [TICKET] * 3
            assert s.worker.senders == ["prefill-0"] * 2
            assert "drain 2.5" in s.worker.log
            assert s.worker.log[-1] == "assign prefill"

    asyncio.run(run())


def test_a_request_arrives_whole_with_the_time_it_has_left() -> None:
    async def run() -> None:
        async with served() as s:
            sent = replace(request((5, 6), max_tokens=9, seed=2**64 - 1, top_k=7), output_ids=(1, 2))
            await s.prefill.prefill(sent, TICKET)
            (got,) = s.worker.requests
            assert 20.0 < got.timeout_s < 30.1  # gRPC rounds the deadline up
            assert replace(got, timeout_s=30.0) == sent

    asyncio.run(run())


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.prefill.prefill(request(), TICKET),
        lambda s: s.decode.reserve(request(), sender_id="prefill-0"),
        generate,
        lambda s: s.decode.release(TICKET),
        lambda s: s.control.audit(),
    ],
)
@pytest.mark.parametrize(
    "error", [NoFreeBlocks(needed=3, free=1, total=8), TransferTimeout("3.0 s without a frame")]
)
def test_an_error_is_raised_here_as_it_was_there(call: Call, error: ServingError) -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.error = error
            with pytest.raises(type(error)) as caught:
                await call(s)
            assert vars(caught.value) == vars(error)
            assert str(caught.value) == str(error)

    asyncio.run(run())


def test_what_was_streamed_before_an_error_has_arrived() -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.error = TransferRefused("gone")
            got = []
            with pytest.raises(TransferRefused, match="gone"):
                async with aclosing(s.decode.generate(request())) as outputs:
                    async for output in outputs:
                        got.append(output.index)
            assert got == [0, 1]

    asyncio.run(run())


def test_a_bug_in_one_call_ends_that_call_alone() -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.held.update(CALLS)
            other = asyncio.ensure_future(generate(s))
            await eventually(lambda: "generate" in s.worker.waiting)
            s.worker.error = KeyError("secret prompt")
            with pytest.raises(InternalError, match=r"^the worker failed with KeyError$"):
                await s.decode.release(TICKET)
            s.worker.error = None
            assert not other.done()
            other.cancel()
            assert await s.control.status() == s.worker.load

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("prefill", lambda s: s.prefill.prefill(request(), TICKET)),
        ("generate", generate),
        ("resume", resume),
        ("audit", lambda s: s.control.audit()),
    ],
)
def test_cancelling_a_call_cancels_it_on_the_worker(name: str, call: Call) -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.held.add(name)
            calling = asyncio.ensure_future(call(s))
            await eventually(lambda: name in s.worker.log)
            await asyncio.sleep(0.05)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await eventually(lambda: f"{name} aborted" in s.worker.log)

    asyncio.run(run())


def test_closing_a_stream_early_aborts_it_on_the_worker() -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.held.update(CALLS)
            async with aclosing(s.decode.generate(request())) as outputs:
                assert (await anext(outputs)).index == 0
            await eventually(lambda: "generate aborted" in s.worker.log)

    asyncio.run(run())


def test_a_consumer_that_stops_reading_can_still_abort() -> None:
    """The worker is stuck in a write, not in its generator: the generator must be closed all the same."""

    async def run() -> None:
        async with served() as s:
            many = (
                None,
                *(TokenLogprob(1, -1.0, 1, tuple((t, -1.0) for t in range(20))) for _ in range(20_000)),
            )
            s.worker.outputs = tuple(
                TokenOutput(index=i, token_id=1, prompt_logprobs=many) for i in range(40)
            )
            async with aclosing(s.decode.generate(request())) as outputs:
                await anext(outputs)
                await asyncio.sleep(0.5)
            await eventually(lambda: "generate aborted" in s.worker.log)

    asyncio.run(run())


def test_a_reservation_whose_caller_left_is_given_back() -> None:
    """The answer carries the only name of the room that was taken; it must not get lost."""

    async def run() -> None:
        async with served() as s:
            s.worker.held.update(CALLS)
            reserving = asyncio.ensure_future(s.decode.reserve(request(), sender_id="prefill-0"))
            await eventually(lambda: s.worker.log == ["reserve"])
            reserving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reserving
            s.worker.held.clear()
            await eventually(lambda: s.worker.log == ["reserve", "release"])
            await eventually(lambda: s.worker.tickets == [TICKET])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("prefill", lambda s: s.prefill.prefill(request(timeout_s=0.3), TICKET)),
        ("reserve", lambda s: s.decode.reserve(request(timeout_s=0.3), sender_id="prefill-0")),
        ("generate", lambda s: generate(s, timeout_s=0.3)),
    ],
)
def test_the_deadline_of_a_request_ends_its_call_on_both_sides(name: str, call: Call) -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.held.update(CALLS)
            with pytest.raises(DeadlineExceeded):
                await call(s)
            await eventually(lambda: f"{name} aborted" in s.worker.log)

    asyncio.run(run())


def test_a_resume_has_what_its_reservation_had_left() -> None:
    async def run() -> None:
        async with served() as s:
            ticket = await s.decode.reserve(request(timeout_s=0.3), sender_id="prefill-0")
            s.worker.held.update(CALLS)
            with pytest.raises(DeadlineExceeded):
                async with aclosing(s.decode.resume(ticket, FIRST)) as outputs:
                    async for _ in outputs:
                        pass
            await eventually(lambda: "resume aborted" in s.worker.log)

    asyncio.run(run())


def test_a_released_ticket_is_not_resumed() -> None:
    async def run() -> None:
        async with served() as s:
            ticket = await s.decode.reserve(request(), sender_id="prefill-0")
            await s.decode.release(ticket)
            with pytest.raises(TransferRefused):
                await anext(s.decode.resume(ticket, FIRST))
            assert "resume" not in s.worker.log

    asyncio.run(run())


def test_a_request_whose_time_is_over_is_not_sent() -> None:
    async def run() -> None:
        async with served() as s:
            for call in (
                s.prefill.prefill(request(timeout_s=0.0), None),
                s.decode.reserve(request(timeout_s=-1.0), sender_id="prefill-0"),
            ):
                with pytest.raises(DeadlineExceeded):
                    await call
            assert s.worker.log == []

    asyncio.run(run())


def test_a_call_without_a_deadline_is_refused_by_name() -> None:
    async def run() -> None:
        async with served() as s:
            method = raw(s.channel.grpc, "Worker/Audit")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "timeout_s: the call has no deadline"
            assert s.worker.log == []

    asyncio.run(run())


def test_a_role_that_does_not_exist_is_refused_by_name() -> None:
    async def run() -> None:
        async with served() as s:
            method = raw(s.channel.grpc, "Worker/Assign")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(worker_pb2.AssignRequest(role="manager").SerializeToString(), timeout=5.0)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "role: 'manager' is none of prefill, decode, colocated"
            assert s.worker.log == []

    asyncio.run(run())


@pytest.mark.parametrize("payload", [b"\xff" * 64, b"", os.urandom(1000), b"\x0a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_request_are_refused(payload: bytes) -> None:
    async def run() -> None:
        async with served() as s:
            for method in ("Prefill/Prefill", "Decode/Reserve", "Decode/Release"):
                call = raw(s.channel.grpc, method)
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(payload, timeout=5.0)
            assert s.worker.log == []
            assert await generate(s) == list(s.worker.outputs)

    asyncio.run(run())


def test_a_request_of_a_broken_peer_is_refused_by_its_field() -> None:
    async def run() -> None:
        async with served() as s:
            method = raw(s.channel.grpc, "Decode/Reserve")
            message = worker_pb2.ReserveRequest(
                request=types_pb2.Request(request_id="r", prompt_ids=[2**31]), sender_id="p"
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message.SerializeToString(), timeout=5.0)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "prompt_ids: token id 2147483648 is more than 2147483647"

    asyncio.run(run())


def test_an_answer_that_is_nonsense_is_the_workers_fault() -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.outputs = (TokenOutput(index=0, token_id=2**31),)
            with pytest.raises(InternalError, match="worker decode-0 answered nonsense: token_id"):
                await s.prefill.prefill(request(), TICKET)

    asyncio.run(run())


def test_a_message_larger_than_a_request_can_be_is_refused() -> None:
    async def run() -> None:
        async with served() as s:
            async with grpc.aio.insecure_channel(s.server.address) as channel:
                method = raw(channel, "Decode/Reserve")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(bytes(17 * 2**20), timeout=10.0)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert s.worker.log == []

    asyncio.run(run())


def test_the_logprobs_of_a_long_prompt_fit_into_an_answer() -> None:
    async def run() -> None:
        async with served() as s:
            top = tuple((2**31 - 1 - i, -float(i)) for i in range(20))
            logprobs = (None, *(TokenLogprob(2**31 - 1, -0.5, 3, top) for _ in range(32_000)))
            s.worker.outputs = (TokenOutput(index=0, token_id=1, prompt_logprobs=logprobs),)
            first = await s.prefill.prefill(request(), TICKET)
            assert first.prompt_logprobs == logprobs

    asyncio.run(run())


def test_a_worker_that_is_not_there_is_lost_at_once() -> None:
    async def run() -> None:
        async with served() as s:
            address = s.server.address
        channel = WorkerChannel(address, "decode-9", trust=ROUTER)
        client = DecodeClient(channel, SystemClock())
        started = asyncio.get_running_loop().time()
        with pytest.raises(WorkerLost) as caught:
            await client.reserve(request(timeout_s=60.0), sender_id="prefill-0")
        assert caught.value.worker_id == "decode-9"
        assert asyncio.get_running_loop().time() - started < 10.0
        await channel.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "call",
    [
        generate,
        lambda s: s.prefill.prefill(request(), TICKET),
        lambda s: s.decode.reserve(request(), sender_id="prefill-0"),
    ],
)
def test_closing_the_channel_ends_its_calls_as_lost(call: Call) -> None:
    """The router closes the channel of a worker that it has given up; who waits must hear of it."""

    async def run() -> None:
        async with served() as s:
            s.worker.held.update(CALLS)
            calling = asyncio.ensure_future(call(s))
            await eventually(lambda: s.worker.log != [])
            await asyncio.sleep(0.05)
            await s.channel.close()
            with pytest.raises(WorkerLost):
                await calling
            with pytest.raises(WorkerLost):
                await s.decode.release(TICKET)

    asyncio.run(run())


WORKER_PROCESS = """
import asyncio
from tests.rpc.fakes import FakeWorker
from tests.trust import worker_door
from twinpool.rpc.server import WorkerServer

async def main():
    worker = FakeWorker()
    worker.held.add("generate")
    server = WorkerServer(prefill=worker, decode=worker, worker=worker, door=worker_door())
    await server.start()
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "limit_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 12.0)])
def test_a_worker_killed_or_frozen_in_mid_stream_is_lost_soon(how: signal.Signals, limit_s: float) -> None:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER_PROCESS, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
            channel = WorkerChannel(address, "decode-0", trust=ROUTER)
            client = DecodeClient(channel, SystemClock())
            got = []
            with pytest.raises(WorkerLost) as caught:
                async with aclosing(client.generate(request(timeout_s=60.0))) as outputs:
                    async for output in outputs:
                        got.append(output.index)
                        if output.index == 1:
                            process.send_signal(how)
                            ended_s = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - ended_s < limit_s
            assert got == [0, 1]
            assert caught.value.worker_id == "decode-0"
            await channel.close()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    asyncio.run(run())


def test_a_call_may_be_silent_for_longer_than_pings_go_unpunished() -> None:
    """gRPC cuts a connection after three pings that came faster than the server allows."""

    async def run() -> None:
        async with served() as s:
            s.worker.held.add("prefill")
            calling = asyncio.ensure_future(s.prefill.prefill(request(timeout_s=60.0), None))
            await asyncio.sleep(5 * KEEPALIVE_S)
            assert not calling.done()
            s.worker.held.clear()
            assert await calling == FIRST

    asyncio.run(run())


def test_stopping_gives_running_calls_their_grace() -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.held.update(CALLS)
            running = asyncio.ensure_future(s.prefill.prefill(request(), TICKET))
            await eventually(lambda: "prefill" in s.worker.log)
            stopping = asyncio.ensure_future(s.server.stop(grace_s=30.0))
            await asyncio.sleep(0.1)
            s.worker.held.clear()
            assert await running == s.worker.outputs[0]
            await asyncio.wait_for(stopping, 10.0)

    asyncio.run(run())


def test_health_tells_a_worker_that_drains_or_stands_still() -> None:
    async def run() -> None:
        async with served() as s:
            health = health_pb2_grpc.HealthStub(s.channel.grpc)

            async def check(service: str) -> str:
                reply = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

            request_services = ["", "twinpool.v1.Prefill", "twinpool.v1.Decode"]
            assert [await check(name) for name in request_services] == ["SERVING"] * 3
            for ill in (replace(s.worker.load, draining=True), replace(s.worker.load, stalled_s=6.0)):
                s.worker.load = ill
                assert [await check(name) for name in request_services] == ["NOT_SERVING"] * 3
                assert await check("twinpool.v1.Worker") == "SERVING"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check("twinpool.v1.Nothing")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(run())


def test_health_can_be_watched() -> None:
    async def run() -> None:
        async with served() as s:
            health = health_pb2_grpc.HealthStub(s.channel.grpc)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20.0)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            s.worker.load = replace(s.worker.load, draining=True)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()

    asyncio.run(run())


def test_a_port_that_is_taken_is_an_error_at_the_start() -> None:
    async def run() -> None:
        async with served() as s:
            worker = FakeWorker()
            with pytest.raises(ConfigError, match=f"127.0.0.1:{s.server.port} cannot be listened on"):
                WorkerServer(
                    prefill=worker, decode=worker, worker=worker, door=worker_door(), port=s.server.port
                )

    asyncio.run(run())


def test_the_last_output_says_why_it_is_the_last() -> None:
    async def run() -> None:
        async with served() as s:
            assert (await generate(s))[-1] == LAST

    asyncio.run(run())


def test_an_invalid_request_found_by_the_port_keeps_its_param() -> None:
    async def run() -> None:
        async with served() as s:
            s.worker.error = InvalidRequest("logit_bias", "token 999 is not in the vocabulary")
            with pytest.raises(InvalidRequest) as caught:
                await s.decode.reserve(request(), sender_id="prefill-0")
            assert caught.value.param == "logit_bias"

    asyncio.run(run())
