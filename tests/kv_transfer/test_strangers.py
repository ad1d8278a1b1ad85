"""A port and a crowd that says nothing: nobody of it stays, and a true sender gets in all the time."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.addresses import split
from kv_transfer.hub import Hub
from kv_transfer.registry import unavailable
from kv_transfer.transports import grpc
from tests.kv_transfer.receiver_process import CONFIG
from tests.kv_transfer.workers import SENDER_ID, Worker, expect, start_worker, write_all
from tests.patience import PATIENCE_S
from tests.trust import tls_files
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.core.tls import Party

SHORT = replace(CONFIG, connect_timeout_s=1.0)
BLOCKS, TOKENS = tuple(range(32)), 128
NUM_STRANGERS = 200
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, ACKNOWLEDGED = b"\0\0\0\4\0\0\0\0\0", b"\0\0\0\4\1\0\0\0\0"


async def is_gone(end: socket.socket) -> None:
    """Return when the other end has closed the connection."""
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):
        while await loop.sock_recv(end, 65536):
            pass


async def crowd(worker: Worker, first_words: bytes) -> list[socket.socket]:
    """Connect often, and say no more than ``first_words`` each time."""
    loop = asyncio.get_running_loop()
    ends = []
    for _ in range(NUM_STRANGERS):
        end = socket.socket()
        end.setblocking(False)
        await loop.sock_connect(end, split(worker.transport.endpoint.address))
        with suppress(ConnectionError):
            await loop.sock_sendall(end, first_words)
        ends.append(end)
    return ends


async def one_whole_transfer(prefill: Worker, decode: Worker) -> None:
    ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, BLOCKS)
    await transfer.wait()
    assert (decode.store.bytes == prefill.store.bytes).all()


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize(
    ("name", "first_words"),
    [
        pytest.param("tcp", b"", id="tcp"),
        pytest.param("torch_dist", b"", id="torch_dist"),
        pytest.param("grpc", b"", id="grpc"),
        pytest.param("grpc", PREFACE, id="grpc, preface"),
        pytest.param("grpc", PREFACE + SETTINGS, id="grpc, settings"),
        pytest.param("grpc", PREFACE + SETTINGS + ACKNOWLEDGED, id="grpc, no call"),
    ],
)
def test_nobody_who_says_nothing_stays(
    name: str, first_words: bytes, *, has_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unavailable(name):
        pytest.skip(unavailable(name))
    if first_words.endswith(ACKNOWLEDGED):  # HTTP/2 has nothing more to wait for
        options = {**dict(grpc._SERVER_OPTIONS), "grpc.max_connection_idle_ms": 1000}
        monkeypatch.setattr(grpc, "_SERVER_OPTIONS", tuple(options.items()))
    make_files(tmp_path, Wanted())
    tls = tls_files(tmp_path, Party.WORKER) if has_tls else None

    async def scenario() -> None:
        decode = await start_worker(name, SHORT, hub=Hub(), tls=tls)
        prefill = await start_worker(name, SHORT, hub=Hub(), worker_id=SENDER_ID, tls=tls)
        ends = await crowd(decode, first_words)
        try:
            await one_whole_transfer(prefill, decode)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*map(is_gone, ends))
            await one_whole_transfer(prefill, decode)
        finally:
            for end in ends:
                end.close()
            await prefill.close()
            await decode.close()

    asyncio.run(scenario())
