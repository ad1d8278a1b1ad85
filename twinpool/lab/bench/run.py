"""A whole run: find out how the server wants to be asked, warm it up, measure, and sum up."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from twinpool.checkpoints.resolve import resolve_model
from twinpool.core.errors import ConfigError, Unavailable
from twinpool.lab.bench.bodies import Requests
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.bench.connection import ConnectionPool
from twinpool.lab.bench.fetch import fetch
from twinpool.lab.bench.generator import LoadGenerator
from twinpool.lab.bench.loop import precise_loop
from twinpool.lab.bench.result import BenchResult
from twinpool.lab.bench.target import Target, read_target
from twinpool.lab.bench.vocabulary import TEXT, Vocabulary
from twinpool.lab.machine import describe_machine
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.record import Record
from twinpool.lab.workload.item import WorkItem
from twinpool.lab.workload.readable import Readable
from twinpool.lab.workload.workload import Workload
from twinpool.text.tokenizer import Tokenizer

_WARM_TOKENS = 8  # most that an answer of the warm-up has

OnRecord = Callable[[Record], None]
OnStart = Callable[[LoadGenerator, Summary], None]


def run_bench(
    workload: Workload,
    config: BenchConfig,
    *,
    api_key: str | None = None,
    on_record: OnRecord = lambda record: None,
    on_start: OnStart = lambda generator, summary: None,
) -> BenchResult:
    """Send a workload to a server and measure its answers; for callers without an event loop.

    Args:
        workload: What is sent, and when.
        config: How, and to whom.
        api_key: Sent as a bearer token; not part of the config, which is written down.
        on_record: Called with each request that has ended.
        on_start: Called as the run begins, with what can stop it and with what it comes to so far.

    Raises:
        ConfigError: A setting cannot work, or not even the first request of the workload can be read.
        Unavailable: The server does not answer, or refuses the warm-up.
    """
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(
            run_bench_async(workload, config, api_key=api_key, on_record=on_record, on_start=on_start)
        )


async def run_bench_async(
    workload: Workload,
    config: BenchConfig,
    *,
    api_key: str | None = None,
    on_record: OnRecord = lambda record: None,
    on_start: OnStart = lambda generator, summary: None,
) -> BenchResult:
    """Do the same as ``run_bench`` in the running event loop; ``precise_loop`` gives the most precise one."""
    target = read_target(config.url, api_key=api_key)
    pool = ConnectionPool(target, most=config.max_connections, connect_timeout_s=config.connect_timeout_s)
    try:
        requests, prompts_of = await _requests(pool, target, config)
        await _warm_up(workload, requests, pool, config)
        version = await _version(pool, target)
        summary, num_late = Summary(config.limits), 0

        def note(record: Record) -> None:
            nonlocal num_late
            summary.add(record)
            num_late += record.sent_s - record.due_s > config.late_limit_s
            on_record(record)

        generator = LoadGenerator(requests, pool, config, on_record=note)
        readable = Readable(workload)
        watched = _Watched(readable)
        machine, cpu_s, begun_s = describe_machine(), time.process_time(), time.monotonic()
        on_start(generator, summary)
        await generator.run(watched)
        return BenchResult(
            config=config,
            workload=workload.to_json(),
            digest=watched.digest,
            run_id=requests.run_id,
            model=requests.model,
            server_version=version,
            prompts_of=prompts_of,
            machine=machine,
            num_sent=generator.num_sent,
            most_in_flight=generator.most_in_flight,
            num_late=num_late,
            first_due_s=watched.first_due_s,
            last_due_s=watched.last_due_s,
            cpu_s=time.process_time() - cpu_s,
            elapsed_s=time.monotonic() - begun_s,
            is_interrupted=generator.is_stopped,
            unread=readable.problem,
            num_uncounted=generator.num_uncounted,
            num_other_length=generator.num_other_length,
            first_problem=generator.first_problem,
            summary=summary,
        )
    finally:
        await pool.close()


class _Watched:
    """A workload that remembers what was taken of it."""

    def __init__(self, workload: Iterable[WorkItem]) -> None:
        self.first_due_s = math.inf
        self.last_due_s = 0.0
        self._workload = workload
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[WorkItem]:
        for item in self._workload:
            self._hash.update(repr(item).encode())
            self.first_due_s = min(self.first_due_s, item.arrival_s)
            self.last_due_s = item.arrival_s
            yield item


async def _requests(pool: ConnectionPool, target: Target, config: BenchConfig) -> tuple[Requests, str]:
    model = config.model or await _first_model(pool, target)
    ids, prompts_of = await _ids(pool, target, config, model)
    vocabulary = Vocabulary(ids, seed=config.seed)
    requests = Requests(
        target=target,
        config=config,
        model=model,
        vocabulary=vocabulary,
        run_id=f"bench-{uuid.uuid4().hex[:12]}",
    )
    return requests, prompts_of


async def _first_model(pool: ConnectionPool, target: Target) -> str:
    told = await fetch(pool, target, "/v1/models")
    try:
        return str(told["data"][0]["id"])
    except (LookupError, TypeError):
        raise ConfigError("bench.model", "is missing, and the server names none") from None


async def _ids(
    pool: ConnectionPool, target: Target, config: BenchConfig, model: str
) -> tuple[tuple[int, ...], str]:
    """Return tokens that prompts are made of, none if only text will do, and where they are from."""
    if config.endpoint == "chat":
        return (), "words"
    if config.tokenizer:
        folder = await asyncio.to_thread(resolve_model, config.tokenizer)
        ids = Tokenizer.load(folder).encode(TEXT, add_special_tokens=False)
        return tuple(sorted(set(ids))), "tokenizer"
    try:
        body = {"model": model, "prompt": TEXT, "add_special_tokens": False}
        told = await fetch(pool, target, "/tokenize", body=body)
    except Unavailable:
        return (), "words"
    known = told.get("tokens") if isinstance(told, Mapping) else None
    if not isinstance(known, list) or not all(isinstance(token_id, int) for token_id in known):
        return (), "words"
    return tuple(sorted(set(known))), "server"


async def _version(pool: ConnectionPool, target: Target) -> str:
    try:
        told: Any = await fetch(pool, target, "/version")
    except Unavailable:
        return ""
    return str(told.get("version", "")) if isinstance(told, Mapping) else ""


async def _warm_up(workload: Workload, requests: Requests, pool: ConnectionPool, config: BenchConfig) -> None:
    """Ask for short answers to prompts like the first ones, with other content, one after the other."""
    for number, item in enumerate(islice(workload, config.warmup), 1):
        records: list[Record] = []
        generator = LoadGenerator(
            requests, pool, replace(config, cancel_share=0.0, timelines=False), on_record=records.append
        )
        short = min(item.output_tokens, _WARM_TOKENS)
        await generator.run([replace(item, index=-number, arrival_s=0.0, output_tokens=short, blocks=())])
        if generator.first_problem:
            raise Unavailable(f"the warm-up was not answered: {generator.first_problem}")
