"""A whole HTTP site of toys: a byte-level tokenizer, a worker that follows a script, a real server."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from router.config import RouterConfig
from router.http.app import create_app
from router.http.config import HTTPConfig
from router.http.model import ServedModel
from router.http.server import HTTPServer
from router.router import Router
from router.workers import WorkerPool, WorkerPorts
from tests.toys import layout
from twinpool.core.clock import SystemClock
from twinpool.core.errors import ServingError
from twinpool.core.ports import BlockCounts, Role, WorkerAudit, WorkerInfo, WorkerLoad
from twinpool.core.request import FinishReason, Request, TokenLogprob, TokenOutput
from twinpool.core.ticket import Endpoint, KVTicket, TransferReport
from twinpool.text.chat import ChatTemplate
from twinpool.text.tokenizer import Tokenizer

MODEL = "toy"
NUM_BYTES = 256  # ids 0 to 255 are the bytes
BOS, EOS = 256, 257
VOCAB_SIZE = 258
MAX_MODEL_TOKENS = 512
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, whose id is the byte, and two control tokens."""
    byte_chars = _byte_chars()
    vocab = {char: byte for byte, char in enumerate(byte_chars)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return Tokenizer(backend, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"}, bos_id=BOS)


def toy_model() -> ServedModel:
    """What the site serves."""
    tokenizer = byte_tokenizer()
    return ServedModel(
        name=MODEL,
        tokenizer=tokenizer,
        template=ChatTemplate({"default": TEMPLATE}, tokenizer),
        vocab_size=VOCAB_SIZE,
        max_model_tokens=MAX_MODEL_TOKENS,
        created_s=1_700_000_000,
    )


def logprob_of(token_id: int, num: int) -> TokenLogprob:
    """Log-probabilities that are a function of the token alone; the chosen one is the best."""
    top = tuple(((token_id + rank) % NUM_BYTES, -0.5 - rank) for rank in range(num))
    return TokenLogprob(token_id, -0.5, 1, top)


@dataclass
class ScriptedWorker:
    """Answers every prompt with ``script``: text, or token ids; at its end comes the end token.

    It plays all workers of a site.
    """

    script: str | Sequence[int] = "hello"
    by_seed: dict[int, str] = field(default_factory=dict)  # other scripts, by the seed of the request
    by_prompt: dict[str, str] = field(default_factory=dict)  # other scripts, by the text of the prompt
    delay_s: float = 0.0  # before each token
    error_at: int | None = None  # raise ``error`` instead of this token
    error: BaseException = field(default_factory=lambda: ServingError("no"))
    prefill_errors: list[ServingError] = field(default_factory=list)  # of the next prompts sent elsewhere
    resume_errors: list[ServingError] = field(default_factory=list)  # of the next transfers
    cached_tokens: list[int] = field(default_factory=list)  # of the next prompts; then 0
    requests: list[Request] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)  # that were assigned
    num_open: int = 0
    num_tokens: int = 0  # given in all

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            for index, token_id in self._rest(request, len(request.output_ids)):
                await asyncio.sleep(self.delay_s)
                if index == self.error_at:
                    raise self.error
                output = self._first(request, index, token_id)
                self.num_tokens += 1
                yield output
                if output.finish is not None:
                    return
        finally:
            self.num_open -= 1

    async def reserve(self, request: Request, *, sender_id: str) -> KVTicket:
        self.requests.append(request)
        decode = DISAGGREGATED[1]
        return KVTicket(
            transfer_id=uuid.uuid4().hex,
            epoch=decode.generation,
            request_id=request.request_id,
            worker_id=decode.worker_id,
            sender_id=sender_id,
            ranks=decode.ranks,
            layout=decode.layout,
            num_tokens=request.num_tokens,
            cached_tokens=0,
            lease_s=30.0,
            expires_unix_s=time.time() + request.timeout_s,
        )

    async def prefill(self, request: Request, ticket: KVTicket | None) -> TokenOutput:
        if self.prefill_errors:
            raise self.prefill_errors.pop(0)
        ((index, token_id), *_) = self._rest(request, len(request.output_ids))
        return self._first(request, index, token_id)

    async def resume(self, ticket: KVTicket, first: TokenOutput) -> AsyncGenerator[TokenOutput, None]:
        if self.resume_errors:
            raise self.resume_errors.pop(0)
        (request,) = (each for each in self.requests if each.request_id == ticket.request_id)
        for index, token_id in self._rest(request, first.index + 1):
            yield _output(request, index, token_id)

    async def release(self, ticket: KVTicket) -> TransferReport:
        return TransferReport(
            kv_bytes=64,
            num_frames=1,
            first_frame_s=0.0,
            complete_s=0.0,
            transport=ticket.ranks[0][0].transport,
        )

    async def status(self) -> WorkerLoad:
        return WorkerLoad(free_blocks=1000)

    async def drain(self, *, timeout_s: float) -> bool:
        return True

    async def audit(self) -> WorkerAudit:
        blocks = BlockCounts(total=1000, free=1000, cached=0, owned=0, draining=0)
        return WorkerAudit(
            worker_id="c0", role=Role.COLOCATED, blocks=blocks, tickets=0, transfers=0, sequences=0
        )

    async def clear_cache(self) -> int:
        return 7

    async def assign(self, role: Role) -> None:
        self.roles.append(role)

    async def close(self) -> None:
        pass

    def _first(self, request: Request, index: int, token_id: int) -> TokenOutput:
        """Return an output of whoever computes the prompt."""
        output = _output(request, index, token_id)
        if index > len(request.output_ids) or not self.cached_tokens:
            return output
        return replace(output, cached_tokens=self.cached_tokens.pop(0))

    def _rest(self, request: Request, start: int) -> list[tuple[int, int]]:
        return list(enumerate(self._ids(request)))[start:]

    def _ids(self, request: Request) -> list[int]:
        prompt = bytes(token_id for token_id in request.prompt_ids if token_id < NUM_BYTES).decode("latin-1")
        script = self.by_prompt.get(prompt, self.by_seed.get(request.sampling.seed, self.script))
        ids = list(script.encode()) if isinstance(script, str) else list(script)
        return [*ids, EOS] if not request.sampling.ignore_eos else ids * request.sampling.max_tokens


def _output(request: Request, index: int, token_id: int) -> TokenOutput:
    sampling = request.sampling
    finish = None
    if token_id in (*sampling.stop_token_ids, EOS) and index >= sampling.min_tokens:
        finish = FinishReason.STOP
    elif index + 1 == sampling.max_tokens:
        finish = FinishReason.LENGTH
    prompt_logprobs = None
    if index == 0 and sampling.num_prompt_logprobs is not None:
        others = [logprob_of(each, sampling.num_prompt_logprobs) for each in request.prompt_ids[1:]]
        prompt_logprobs = (None, *others)
    return TokenOutput(
        index=index,
        token_id=token_id,
        finish=finish,
        logprob=None if sampling.num_logprobs is None else logprob_of(token_id, sampling.num_logprobs),
        prompt_logprobs=prompt_logprobs,
    )


def _byte_chars() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars, added = [], 0
    for byte in range(256):
        if byte in printable:
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + added))
            added += 1
    return chars


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the last may be the string [DONE]."""
        events: list[Any] = []
        for block in self.body.decode().split("\n\n"):
            if block.startswith("data: "):
                data = block.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
        return events


class Site:
    """A server in a thread of its own.

    Args:
        config: Of the server; its port should be 0.
        router_config: Of the router behind it.
        needs_prefill: Whether the deployment is to have prefill workers.
        workers: Those that have joined; the scripted worker plays all of them.
    """

    def __init__(
        self,
        config: HTTPConfig | None = None,
        router_config: RouterConfig | None = None,
        needs_prefill: bool = True,
        *,
        workers: Sequence[WorkerInfo] | None = None,
    ) -> None:
        self.worker = ScriptedWorker()
        self.port = 0
        self._config = config or HTTPConfig(port=0)
        self._needs_prefill = needs_prefill
        self._router_config = router_config or RouterConfig(max_running_per_worker=1000, queue_timeout_s=0.2)
        self._workers = (worker_info(),) if workers is None else workers
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._is_up.wait(20), "the server did not start"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Ask once, on a connection of its own."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, names, answer.read())

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        """Post JSON."""
        return self.request("POST", path, json.dumps(body).encode(), headers)

    @contextmanager
    def socket(self) -> Iterator[socket.socket]:
        """A plain connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            yield connection

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        worker, clock = self.worker, SystemClock()
        ports = WorkerPorts(prefill=worker, decode=worker, worker=worker, connection=worker)
        pool = WorkerPool(
            self._router_config, clock=clock, connect=lambda _: ports, needs_prefill=self._needs_prefill
        )
        self.router = Router(self._router_config, pool=pool, clock=clock)
        for info in self._workers:
            pool.joined(info)
        self._beat(pool)
        beating = asyncio.create_task(self._beat_forever(pool))
        server = HTTPServer(create_app(self.router, toy_model(), self._config), self._config)
        await server.start()
        self.port = server.port
        self._is_up.set()
        await self._stop.wait()
        beating.cancel()
        await server.stop()
        await self.router.close()
        await pool.close()

    def _beat(self, pool: WorkerPool) -> None:
        for info in self._workers:
            pool.heard(info.worker_id, info.generation, WorkerLoad(free_blocks=1000))

    async def _beat_forever(self, pool: WorkerPool) -> None:
        while True:
            await asyncio.sleep(0.02)
            self._beat(pool)


def worker_info(worker_id: str = "c0", role: Role = Role.COLOCATED) -> WorkerInfo:
    """What the scripted worker says of itself."""
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        address="127.0.0.1:1",
        pid=1234,
        host="toy-host",
        generation=1,
        model=MODEL,
        fingerprint={},
        layout=layout(),
        num_blocks=1000,
        max_model_tokens=MAX_MODEL_TOKENS,
        ranks=((Endpoint("shm", f"/{worker_id}"), Endpoint("grpc", "127.0.0.1:2")),),
    )


DISAGGREGATED = (worker_info("p0", Role.PREFILL), worker_info("d0", Role.DECODE))


def read_until_closed(connection: socket.socket) -> bytes:
    """Read everything that comes until the peer closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def raw_post(path: str, body: object, *headers: str, version: str = "1.1") -> bytes:
    """The bytes of a POST request."""
    payload = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "host: localhost",
        f"content-length: {len(payload)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + payload
