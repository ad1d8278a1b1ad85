"""A deployment of real processes with a secret and certificates: it answers, and strangers get nothing."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from tests.checkpoints_toy import make_checkpoint
from tests.cluster.servers import PATIENCE_S, Server, free_port, serving
from tests.patience import until
from tests.toys import request
from tests.trust import tls_files, trust_of
from twinpool.cluster.api_client import ApiClient
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.core.errors import ServingError
from twinpool.core.tls import Party
from twinpool.rpc import codec
from twinpool.rpc.clients import WorkerChannel, WorkerClient

HEX = re.compile(r"[0-9a-f]{64}")
COMMON = ("--kv-memory", "4MiB", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy"), "llama")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_files(folder, Wanted())
    return folder


@dataclass(frozen=True, slots=True)
class Deployment:
    """A router and two workers, each a process started by hand."""

    server: Server
    join: str
    processes: dict[str, psutil.Process]  # by name

    def unix_sockets(self) -> set[str]:
        """The names of the sockets without a file on which workers wait for KV of the same machine."""
        return {
            connection.laddr
            for process in self.processes.values()
            for connection in process.net_connections(kind="unix")
            if str(connection.laddr).startswith("@")
        }

    def ports(self) -> dict[int, str]:
        """Every port that is listened on, with the name of its process."""
        return {
            connection.laddr.port: name
            for name, process in self.processes.items()
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }


@contextmanager
def program(*args: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "twinpool", *args], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def secured(model: Path, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    logs = tmp_path_factory.mktemp("logs")
    join, http = f"127.0.0.1:{free_port()}", free_port()
    shared = ("--model", str(model), "--certs", str(certs))
    with ExitStack() as stack:

        def run(name: str, *args: str) -> subprocess.Popen[str]:
            return stack.enter_context(program(*args, *shared, log=logs / name))

        router = run(
            "router", "serve", "--without-ray", "--join-port", join.rpartition(":")[2], "--port", str(http)
        )
        workers = {
            role: run(role, "worker", "--role", role, "--join", join, *COMMON)
            for role in ("prefill", "decode")
        }
        assert router.stdout is not None
        assert router.stdout.readline() == f"ready http://127.0.0.1:{http}\n", (logs / "router").read_text()
        processes = {
            name: psutil.Process(process.pid) for name, process in {"router": router, **workers}.items()
        }
        client = ApiClient(f"http://127.0.0.1:{http}")
        yield Deployment(Server(router, client, logs, logs / "router"), join, processes)


def attacks(marker: Path) -> list[bytes]:
    """Return bytes that no door of ours expects; the pickles would make ``marker`` if anybody opened them."""

    class Marker:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(marker), "w")

    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return [
        *(pickle.dumps(Marker(), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
        random.Random(0).randbytes(100_000),
        b"\xff" * 64,
        b"\0" * 64,
        opening + random.Random(1).randbytes(10_000),
        b"POST /push HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n" + pickle.dumps(Marker()),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.Random(2).randbytes(600),
    ]


Door = int | str  # a port of loopback, or the name of a Unix socket without a file, after an "@"


def connect(door: Door) -> socket.socket:
    if isinstance(door, int):
        return socket.create_connection(("127.0.0.1", door), 10.0)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\0" + door.removeprefix("@"))
    return connection


def is_closed_after(data: bytes, door: Door, context: ssl.SSLContext | None = None) -> bool:
    """Send bytes and say that nothing follows; return whether the connection is closed then."""
    with connect(door) as raw:
        connection = (
            raw if context is None else context.wrap_socket(raw, server_hostname=Party.WORKER.dns_name)
        )
        connection.settimeout(30.0)
        try:
            connection.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def attack(
    doors: Iterable[Door], marker: Path, context: ssl.SSLContext | None = None
) -> list[tuple[Door, bytes]]:
    """Send every attack to every door; return those after which a connection stayed open."""
    tries = [(door, data) for door in doors for data in attacks(marker)]
    with ThreadPoolExecutor(16) as pool:
        closed = list(pool.map(lambda each: is_closed_after(each[1], each[0], context), tries))
    return [(door, data[:20]) for (door, data), is_closed in zip(tries, closed, strict=True) if not is_closed]


def test_it_answers_over_two_pools(secured: Deployment) -> None:
    with secured.server.client.stream(
        "/v1/completions", {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    ) as stream:
        assert stream.headers["x-twinpool-path"] == "disaggregated"
        assert list(stream.chunks)
    assert secured.server.client.get("/admin/audit")["ok"]
    assert secured.server.client.get("/admin/deployment")["security"] == "secret and certificates"


def test_every_port_is_on_loopback_and_all_but_http_want_a_certificate(
    secured: Deployment, certs: Path
) -> None:
    http = int(secured.server.client.url.rpartition(":")[2])
    ports = secured.ports()
    files = tls_files(certs, Party.WORKER)
    closed = {}
    for port in ports.keys() - {http}:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(files.ca_file)
        context.set_alpn_protocols(["h2"])
        try:
            with (
                socket.create_connection(("127.0.0.1", port), 5.0) as plain,
                context.wrap_socket(plain) as tls,
            ):
                tls.settimeout(5.0)
                closed[port] = tls.recv(1) == b""
        except OSError as error:  # the alert
            closed[port] = isinstance(error, ssl.SSLError | ConnectionError)

    assert len(ports) >= 5  # HTTP, registry, two workers' services, two workers' KV
    assert set(closed.values()) == {True}, closed
    for process in secured.processes.values():
        for connection in process.net_connections(kind="inet"):
            assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1"


def test_random_bytes_and_pickles_open_nothing(secured: Deployment, tmp_path: Path) -> None:
    expected = secured.server.answer()

    assert len(secured.unix_sockets()) >= 2
    still_open = attack([*secured.ports(), *secured.unix_sockets()], tmp_path / "marker")

    assert still_open == []
    assert not (tmp_path / "marker").exists()
    assert secured.server.answer() == expected
    assert all(process.is_running() for process in secured.processes.values())


def test_random_bytes_and_pickles_of_one_with_a_certificate_open_nothing(
    secured: Deployment, certs: Path, tmp_path: Path
) -> None:
    http = int(secured.server.client.url.rpartition(":")[2])
    expected = secured.server.answer()
    workers = [port for port, name in secured.ports().items() if port != http and name != "router"]
    context = tls_files(certs, Party.WORKER).client_context()
    context.set_alpn_protocols(["h2"])

    still_open = attack(workers, tmp_path / "marker", context)

    assert still_open == []
    assert not (tmp_path / "marker").exists()
    assert secured.server.answer() == expected


def with_files(folder: Path, **files: Path) -> tuple[str, ...]:
    """Return options that take the worker's files of ``folder``, but those that are given."""
    names = {"secret-file": "secret", "tls-cert": "worker.pem", "tls-key": "worker.key", "tls-ca": "ca.pem"}
    there = {name: folder / file for name, file in names.items()}
    given = {name.replace("_", "-"): path for name, path in files.items()}
    return tuple(word for name, path in (there | given).items() for word in (f"--{name}", str(path)))


def worker_that_fails(model: Path, join: str, log: Path, *options: str) -> str:
    """Start a worker that is not to be taken in; return the last line that it wrote."""
    args = ("worker", "--role", "decode", "--join", join, "--model", str(model), *COMMON, *options)
    with program(*args, log=log) as process:
        assert process.wait(PATIENCE_S) == 2
    return log.read_text().splitlines()[-1]


@pytest.mark.slow
def test_a_worker_with_another_secret_is_told_so_and_ends(
    secured: Deployment, model: Path, certs: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_bytes(b"not the secret of this deployment")

    said = worker_that_fails(model, secured.join, tmp_path / "log", *with_files(certs, secret_file=other))

    assert said.startswith("twinpool: error: security.secret_file: no worker with the same secret made")
    assert ": security.secret_file: no worker with the same secret" in secured.server.log.read_text()


@pytest.mark.slow
def test_a_worker_with_files_that_do_not_fit_does_not_start(
    secured: Deployment, model: Path, certs: Path, tmp_path: Path
) -> None:
    router = with_files(certs, tls_cert=certs / "router.pem", tls_key=certs / "router.key")
    mixed = with_files(certs, tls_key=certs / "router.key")
    open_to_all = ("--host", "0.0.0.0")

    assert "its certificate is for router.twinpool" in worker_that_fails(
        model, secured.join, tmp_path / "router", *router
    )
    assert "tls_key: the key does not belong" in worker_that_fails(
        model, secured.join, tmp_path / "mixed", *mixed
    )
    assert "--host: 0.0.0.0 is no address" in worker_that_fails(
        model, secured.join, tmp_path / "open", *open_to_all
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["without TLS", "of another CA"])
def test_a_worker_that_cannot_be_trusted_stays_out_and_says_why(
    secured: Deployment, model: Path, certs: Path, tmp_path: Path, kind: str
) -> None:
    make_files(tmp_path / "foreign", Wanted())
    options = {
        "without TLS": ("--secret-file", str(certs / "secret")),
        "of another CA": with_files(tmp_path / "foreign", secret_file=certs / "secret"),
    }
    said = {
        "without TLS": "the router cannot be reached: it may want TLS",
        "of another CA": "the router cannot be reached: its certificate was not signed by our tls_ca",
    }
    args = ("worker", "--role", "decode", "--join", secured.join, "--model", str(model), *COMMON)
    log = tmp_path / "log"

    with program(*args, *options[kind], log=log):
        assert until(lambda: said[kind] in log.read_text(), within_s=PATIENCE_S), log.read_text()
        joined = {worker["id"] for worker in secured.server.client.get("/admin/workers")}

    assert len(joined) == 2


@pytest.mark.slow
def test_one_that_may_call_and_does_not_read_delays_nobody(secured: Deployment, certs: Path) -> None:
    """H105: streams of somebody who has every right, and never reads what comes."""
    expected = secured.server.answer()
    trust = trust_of(certs, Party.ROUTER)
    # The first message of each answer, about a megabyte, is more than HTTP/2 keeps for one who does not read.
    asked = request(
        tuple(range(5, 105)) * 7, max_tokens=50, ignore_eos=True, num_prompt_logprobs=100, timeout_s=60.0
    )

    async def run() -> None:
        decode = secured.server.client.get("/admin/workers")
        worker_id = next(worker["id"] for worker in decode if worker["role"] == "decode")
        channel = WorkerChannel(await address_of(worker_id), worker_id, trust=trust)
        start = channel.grpc.unary_stream("/twinpool.v1.Decode/Generate", None, None)
        message = codec.request_to_pb(asked).SerializeToString()
        calls = [start(message, timeout=60.0) for _ in range(8)]
        try:
            await asyncio.sleep(2.0)
            assert not any(call.done() for call in calls)
            answers = [await asyncio.to_thread(secured.server.answer) for _ in range(5)]
        finally:
            for call in calls:
                call.cancel()
            await channel.close()
        assert answers == [expected] * 5

    async def address_of(worker_id: str) -> str:
        for port, name in secured.ports().items():
            if name == "decode":
                channel = WorkerChannel(f"127.0.0.1:{port}", worker_id, trust=trust)
                try:
                    await WorkerClient(channel).status()
                    return f"127.0.0.1:{port}"
                except ServingError:
                    continue  # the port of its KV
                finally:
                    await channel.close()
        raise AssertionError("the worker has no services")

    asyncio.run(run())
    assert until(lambda: secured.server.client.get("/admin/audit")["ok"], within_s=PATIENCE_S)


def test_serve_gives_its_workers_a_secret_that_nobody_else_has(model: Path, tmp_path: Path) -> None:
    with serving(model, "--prefill", "1", "--decode", "1") as server:
        expected = server.answer()
        assert server.client.get("/admin/deployment")["security"] == "secret"
        processes = [psutil.Process(server.process.pid), *server.descendants()]
        ours = [process for process in processes if "twinpool" in " ".join(process.cmdline()[:3])]
        ports = {
            connection.laddr.port
            for process in processes
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }

        # No 32 bytes in hex are to be seen anywhere, but for Ray's own token, which our workers do not get.
        for process in processes:
            seen = [*process.cmdline(), *(f"{key}={value}" for key, value in process.environ().items())]
            assert not [word for word in seen if HEX.search(word) and not word.startswith("RAY_AUTH_TOKEN=")]
        pages = [server.client.get(f"/admin/{page}") for page in ("deployment", "workers", "audit")]
        assert not HEX.search(server.log.read_text() + str(pages))

        asyncio.run(nobody_is_served({port for process in ours for port in _listening(process)}))
        attack(ports, tmp_path / "marker")  # Ray's ports, too, whose manners are Ray's
        assert not (tmp_path / "marker").exists()
        assert server.answer() == expected


async def nobody_is_served(ports: Iterable[int]) -> None:
    """Check that no port serves a call of ours to one that has no secret."""
    found = {}
    for port in ports:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            found[port] = {
                await code_of(channel.stream_stream(method))
                for method in (
                    "/twinpool.v1.Worker/Drain",
                    "/twinpool.v1.Registry/Join",
                    "/twinpool.v1.Decode/Generate",
                )
            }
    assert not [port for port, codes in found.items() if grpc.StatusCode.OK in codes], found
    # The registry and two workers; the others carry KV, or are no gRPC.
    assert list(found.values()).count({grpc.StatusCode.UNAUTHENTICATED}) == 3, found


async def code_of(method: Any) -> grpc.StatusCode:
    """Begin a call, say nothing, and return how it ended."""
    try:
        await method(timeout=60.0).read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _listening(process: psutil.Process) -> list[int]:
    return [
        connection.laddr.port
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.slow
def test_workers_that_serve_starts_take_their_certificates(model: Path, certs: Path) -> None:
    with serving(model, "--prefill", "1", "--decode", "1", "--certs", str(certs)) as server:
        assert server.answer()
        assert server.client.get("/admin/deployment")["security"] == "secret and certificates"
        told = [
            text
            for process in (psutil.Process(server.process.pid), *server.descendants())
            for text in (*process.cmdline(), *process.environ().values())
        ]
        assert (certs / "secret").read_text().strip() not in told
