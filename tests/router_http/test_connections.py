"""Clients that leave, half-close, pipeline, dawdle or speak nonsense, on real sockets."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.http.clients import MAX_AT_ONCE
from router.http.config import HTTPConfig
from router.http.server import HTTPServer
from tests.patience import until
from tests.router_http.toys import Reply, Site, raw_post, read_until_closed
from twinpool.core.errors import ConfigError

COMPLETIONS = "/v1/completions"
NOTICE_S = 3.0  # about 0.5 on an idle machine; without noticing it would be 30
LONG = {"prompt": "a", "ignore_eos": True, "max_tokens": 400}


def seconds_until_idle(site: Site) -> float:
    began_s = time.monotonic()
    assert until(lambda: site.worker.num_open == 0 and site.router.num_in_flight == 0)
    return time.monotonic() - began_s


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.02, 30.0])
def test_a_client_that_closes_ends_its_work_within_a_second(site: Site, stream: bool, delay_s: float) -> None:
    site.worker.delay_s = delay_s
    with site.socket() as connection:
        connection.sendall(raw_post(COMPLETIONS, {**LONG, "stream": stream}))
        assert until(lambda: site.worker.num_open == 1)
        time.sleep(0.1)

    assert seconds_until_idle(site) < NOTICE_S
    assert site.worker.num_tokens < 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_resets_ends_its_work(site: Site, stream: bool) -> None:
    site.worker.delay_s = 0.02
    with site.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(raw_post(COMPLETIONS, {**LONG, "stream": stream, "n": 3}))
        assert until(lambda: site.worker.num_open == 3)

    assert seconds_until_idle(site) < NOTICE_S


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_ends_its_sending_gets_its_answer(site: Site, stream: bool) -> None:
    site.worker.script, site.worker.delay_s = "hello", 0.25
    with site.socket() as connection:
        connection.sendall(raw_post(COMPLETIONS, {"prompt": "a", "stream": stream}))
        connection.shutdown(socket.SHUT_WR)
        answer = read_until_closed(connection)

    interim, _, final = answer.rpartition(b"HTTP/1.1 200 OK")
    assert interim.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == b""
    body = final.split(b"\r\n\r\n", 1)[1]
    if stream:
        assert b"[DONE]" in body and b": ping" in body
    else:
        assert json.loads(body)["choices"][0]["text"] == "hello"


def test_a_half_closed_client_that_leaves_later_ends_its_work(site: Site) -> None:
    site.worker.delay_s = 30.0
    with site.socket() as connection:
        connection.sendall(raw_post(COMPLETIONS, LONG))
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.6)
        assert site.worker.num_open == 1

    assert seconds_until_idle(site) < NOTICE_S


def test_http_clients_skip_the_probes_of_a_half_closed_connection(site: Site) -> None:
    site.worker.script, site.worker.delay_s = "hi", 0.4
    with closing(http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)) as connection:
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "a"}))
        connection.sock.shutdown(socket.SHUT_WR)
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "hi"

    class HalfClosing(httpx.HTTPTransport):
        """Ends its sending when the request is out."""

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            def half_close(name: str, info: dict[str, object]) -> None:
                if name == "connection.connect_tcp.complete":
                    sockets.append(info["return_value"].get_extra_info("socket"))  # type: ignore[attr-defined]
                if name == "http11.send_request_body.complete":
                    sockets[-1].shutdown(socket.SHUT_WR)

            request.extensions["trace"] = half_close
            return super().handle_request(request)

    sockets: list[socket.socket] = []
    with httpx.Client(
        transport=HalfClosing(), base_url=f"http://127.0.0.1:{site.port}", timeout=20
    ) as client:
        whole = client.post(COMPLETIONS, json={"prompt": "a"})
        lines = list(client.post(COMPLETIONS, json={"prompt": "a", "stream": True}).iter_lines())
    assert whole.json()["choices"][0]["text"] == "hi"
    assert lines[-2] == "data: [DONE]"


def test_a_client_that_pipelined_and_left_ends_its_work(site: Site) -> None:
    site.worker.delay_s = 30.0
    with site.socket() as connection:
        connection.sendall(raw_post(COMPLETIONS, LONG))
        assert until(lambda: site.worker.num_open == 1)
        connection.sendall(raw_post(COMPLETIONS, LONG))
        time.sleep(0.1)

    assert seconds_until_idle(site) < NOTICE_S
    assert len(site.worker.requests) == 1


def test_http_1_0_gets_no_interim_answers(site: Site) -> None:
    site.worker.script, site.worker.delay_s = "hello", 0.1
    with site.socket() as connection:
        connection.sendall(raw_post(COMPLETIONS, {"prompt": "a"}, version="1.0"))
        answer = read_until_closed(connection)

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"hello" in answer


def test_pipelined_requests_are_answered_in_order(site: Site) -> None:
    site.worker.by_prompt = {"a": "first", "b": "second"}
    with site.socket() as connection:
        both = raw_post(COMPLETIONS, {"prompt": "a"})
        both += raw_post(COMPLETIONS, {"prompt": "b"}, "connection: close")
        connection.sendall(both)
        answer = read_until_closed(connection)

    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert 0 < answer.index(b'"first"') < answer.index(b'"second"')


def test_a_connection_lives_on_after_a_400(site: Site) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)) as connection:
        statuses = []
        for path, body in ((COMPLETIONS, {}), ("/nope", {"a": 1}), (COMPLETIONS, {"prompt": "a"})):
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)

    assert statuses == [400, 404, 200]


def test_chunked_bodies_are_read(site: Site) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    with site.socket() as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for byte in body:
            connection.sendall(b"1\r\n%c\r\n" % byte)
        connection.sendall(b"0\r\n\r\n")
        answer = read_until_closed(connection)

    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_expect_100_continue_is_honoured_and_a_refusal_closes(site: Site) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    head = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\nexpect: 100-continue\r\n\r\n"
    with site.socket() as connection:
        connection.sendall(head.format(COMPLETIONS, len(body)).encode())
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
    with site.socket() as connection:
        connection.sendall(head.format(COMPLETIONS, 10**9).encode())
        answer = read_until_closed(connection)

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", COMPLETIONS, 405, "POST"),
        ("PUT", "/v1/models", 405, "GET, HEAD"),
        ("OPTIONS", COMPLETIONS, 405, "POST"),
        ("HEAD", "/v1/models", 200, None),
        ("GET", "/v1/models/", 200, None),
        ("GET", "/nowhere", 404, None),
        ("POST", "/", 404, None),
    ],
)
def test_methods_and_paths(site: Site, method: str, path: str, status: int, allow: str | None) -> None:
    reply = site.request(method, path)

    assert reply.status == status
    assert reply.headers["x-request-id"]
    assert ", ".join(sorted(reply.headers["allow"].split(", "))) == allow if allow else True
    if status != 200:
        assert reply.json["error"]["message"]
    if method == "HEAD":
        assert reply.body == b""


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://x/v1/models", 200),
        ("HTTP://other:81/v1/models?a=http://y", 200),
        ("http://x", 404),
        ("/http://x/v1/models", 404),
        ("x/v1/models", 404),
    ],
)
def test_a_target_may_name_the_host_as_well(site: Site, target: str, status: int) -> None:
    with site.socket() as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = read_until_closed(connection)

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", 431),
        (b"GET /" + b"a" * 16_385 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
        (b"GET /" + b"a" * 100_000, 431),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
        (
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            400,
        ),
    ],
)
def test_what_is_no_http_is_refused_in_the_apis_shape(site: Site, sent: bytes, status: int) -> None:
    with site.socket() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = read_until_closed(connection)

    head, _, body = answer.partition(b"\r\n\r\n")
    if b"zz" not in sent:  # there the answer was on its way before the nonsense came
        assert head.split(b" ")[1] == b"%d" % status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def hasty() -> Iterator[Site]:
    site = Site(
        HTTPConfig(port=0, header_timeout_s=0.3, body_timeout_s=0.3, keep_alive_s=1.0, stop_timeout_s=0)
    )
    yield site
    site.close()


def test_a_slow_body_times_out_and_hurts_nobody(hasty: Site) -> None:
    with hasty.socket() as connection:
        connection.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n".encode()
        )
        for _ in range(5):
            connection.sendall(b" ")
            assert hasty.post(COMPLETIONS, {"prompt": "a"}).status == 200
            time.sleep(0.1)
        answer = connection.recv(1000)

    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost:"])
def test_slow_headers_close_the_connection(hasty: Site, sent: bytes) -> None:
    with hasty.socket() as connection:
        connection.sendall(sent)
        assert read_until_closed(connection) == b""


def test_two_live_requests_with_one_client_id_do_not_collide(site: Site) -> None:
    site.worker.by_prompt, site.worker.delay_s = {"a": "first", "b": "second"}, 0.01
    replies: dict[str, Reply] = {}

    def ask(prompt: str) -> None:
        replies[prompt] = site.post(COMPLETIONS, {"prompt": prompt}, {"x-request-id": "same"})

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {prompt: reply.json["choices"][0]["text"] for prompt, reply in replies.items()} == {
        "a": "first",
        "b": "second",
    }
    assert {reply.headers["x-request-id"] for reply in replies.values()} == {"same"}


def test_with_a_key_everything_but_health_and_ready_asks_for_it() -> None:
    site = Site(HTTPConfig(port=0, api_key="k1"))
    try:
        opened = [site.request("GET", path).status for path in ("/health", "/ready")]
        paths = (
            "/v1/models /version /metrics /admin/workers /admin/audit /admin/requests/x /nope /health/x / //"
        )
        closed = {site.request("GET", path).status for path in paths.split()}
        closed |= {site.post(path, {"prompt": "a"}).status for path in (COMPLETIONS, "/tokenize")}
        wrong = [
            site.request("GET", "/version", headers={"authorization": value}).status
            for value in ("Bearer k2", "Bearer", "k1", "bearer  k1", "Bearer k1 ", "Basic k1", "Bearer \xff")
        ]
        right = site.request("GET", "/version", headers={"authorization": "Bearer k1"}).status
        refused = site.request("GET", "/version")
    finally:
        site.close()

    assert opened == [200, 200]
    assert closed == {401}
    assert [status for status in wrong if status == 401] == wrong[:4] + wrong[5:]
    assert right == 200
    assert refused.headers["www-authenticate"] == "Bearer"


def test_stopping_cuts_open_answers_with_an_error_and_frees_them() -> None:
    site = Site(HTTPConfig(port=0, stop_timeout_s=0.0), RouterConfig(max_running_per_worker=10))
    site.worker.delay_s = 0.05
    with site.socket() as stream, site.socket() as whole:
        stream.sendall(raw_post(COMPLETIONS, {**LONG, "stream": True}))
        whole.sendall(raw_post(COMPLETIONS, LONG))
        assert until(lambda: site.worker.num_open == 2)
        time.sleep(0.2)
        site.close()
        ends = [read_until_closed(stream), read_until_closed(whole)]

    assert b"the server stops" in ends[0] and b"[DONE]" not in ends[0]
    assert ends[1].startswith(b"HTTP/1.1 503 ")
    assert site.worker.num_open == 0


def test_a_taken_port_is_a_config_error(site: Site) -> None:
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody asks")

    with pytest.raises(
        ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{site.port}: Address already in use"
    ):
        asyncio.run(HTTPServer(nothing, HTTPConfig(port=site.port)).start())


def test_a_client_that_never_reads_is_waited_for_and_given_up() -> None:
    site = Site(HTTPConfig(port=0, write_timeout_s=0.3))
    try:
        with site.socket() as connection:
            body = {
                "prompt": ["a"] * 32,
                "n": 16,
                "stream": True,
                "logprobs": 20,
                "max_tokens": 400,
                "ignore_eos": True,
            }
            connection.sendall(raw_post(COMPLETIONS, body, "x-request-id: slow"))
            assert until(lambda: len(site.worker.requests) >= MAX_AT_ONCE)
            assert until(lambda: site.worker.num_open == 0, within_s=30.0)
            outcome = site.request("GET", "/admin/requests/slow").json["outcome"]
    finally:
        site.close()

    assert outcome == "cancelled"
    assert site.worker.num_tokens < 512 * 400
