"""A worker of several ranks: the others are processes of their own, rank 0 is the test itself if it can be.

New processes come from a server that has torch loaded already, so that each takes a moment only.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.engine.runs import Bench
from twinpool.core.secret import Secret
from twinpool.engine.follower import Follower, Written
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import load_model
from twinpool.engine.parallel import GroupConfig, RankGroup
from twinpool.engine.plan import BatchPlan
from twinpool.engine.rank_links import address_of, listen
from twinpool.engine.runner import TorchRunner
from twinpool.engine.torch_group import join_group, lead_group

SECRET = Secret(b"a secret of the tests")
ANSWER_S = 60.0  # more than anything here takes
NUM_BLOCKS = 64
PROMPT = list(b"A prompt whose length is no multiple of any block size, as it should be.")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is to do."""

    folder: Path
    rank: int
    size: int
    address: str = ""
    block_tokens: int = 16
    num_blocks: int = NUM_BLOCKS
    step_timeout_s: float = 60.0
    dtype: str = "float32"
    hangs_in_layer: int | None = None
    fails_in_layer: int | None = None

    def group_config(self) -> GroupConfig:
        return GroupConfig(
            size=self.size, secret=SECRET, step_timeout_s=self.step_timeout_s, start_timeout_s=ANSWER_S
        )

    def hook(self, layer: int, end: Connection) -> None:
        """Be called in a layer: say so and hang, or fail, if that is the job."""
        if layer == self.hangs_in_layer:
            end.send("hangs")
            time.sleep(ANSWER_S)
        if layer == self.fails_in_layer:
            raise ValueError("this rank was told to fail")


@dataclass(kw_only=True)
class Seen:
    """What a rank saw and kept."""

    error: str = ""  # class and text of what ended it
    num_blocks: int = 0
    loaded_bytes: int = 0  # memory of its own that loading the model took
    written: list[tuple[int, tuple[Written, ...]]] = field(default_factory=list)
    layers: list[tuple[Any, Any]] = field(default_factory=list)  # keys and values of its cache, as arrays


class Rank:
    """A process that is one rank."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.engine.ranks"])
        self._end, other = context.Pipe()
        self.process = context.Process(target=_live, args=(job, other), daemon=True)
        self.process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hears(self) -> Any:
        """Return what the process says next."""
        assert self._end.poll(ANSWER_S), "the rank says nothing"
        return self._end.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)
        self._end.close()


@dataclass
class Led:
    """A worker whose rank 0 is here."""

    bench: Bench
    others: list[Rank]
    group: RankGroup

    def ended(self) -> list[Seen]:
        """End the worker and return what its other ranks saw."""
        self.group.close()
        return [rank.hears() for rank in self.others]


@contextmanager
def led(folder: Path, *, size: int, **job: Any) -> Iterator[Led]:
    """Give a worker of ``size`` ranks; ``job`` goes to all of them, ``rank_N`` (a dict) to one."""
    special = {int(name[5:]): job.pop(name) for name in list(job) if name.startswith("rank_")}
    listener = listen("127.0.0.1")
    address = address_of(listener)
    common = {"folder": folder, "size": size, "address": address, **job}
    jobs = [Job(**{**common, "rank": rank, **special.get(rank, {})}) for rank in range(size)]
    with ExitStack() as stack:
        others = [Rank(other) for other in jobs[1:]]
        for other in others:
            stack.callback(other.close)
        group = lead_group(listener, jobs[0].group_config())
        stack.callback(group.close)
        yield Led(_bench(jobs[0], group), others, group)


def _bench(job: Job, group: RankGroup) -> Bench:
    loaded = load_model(job.folder, dtype=job.dtype, group=group)
    layout = loaded.spec.layout(block_tokens=job.block_tokens, tp_size=job.size)
    cache = KVCache(layout, group.minimum(job.num_blocks), "cpu", rank=0)
    free = [number * 37 % cache.num_blocks for number in range(cache.num_blocks)]
    return Bench(loaded, cache, TorchRunner(loaded, cache), free)


def _live(job: Job, end: Connection) -> None:
    torch.set_num_threads(1)
    seen = Seen()
    try:
        if job.rank == 0:
            _lead(job, end)
        else:
            _follow(job, end, seen)
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
    end.send(seen)
    end.poll(ANSWER_S)  # stay until the test has looked: a death of its own is not what it looks at


def _lead(job: Job, end: Connection) -> None:
    listener = listen("127.0.0.1")
    end.send(address_of(listener))
    made = _bench(job, lead_group(listener, job.group_config()))
    item = made.sequence(PROMPT, max_tokens=4).item(chunk=10_000)
    made.runner.run(BatchPlan((item,)), lambda layer: job.hook(layer, end))
    end.send("idle")
    threading.Event().wait(ANSWER_S)


def _follow(job: Job, end: Connection, seen: Seen) -> None:
    group = join_group(job.address, job.group_config(), rank=job.rank)
    before = _own_bytes()
    loaded = load_model(job.folder, dtype=job.dtype, group=group)
    seen.loaded_bytes = _own_bytes() - before
    layout = loaded.spec.layout(block_tokens=job.block_tokens, tp_size=job.size)
    seen.num_blocks = group.minimum(job.num_blocks)
    cache = KVCache(layout, seen.num_blocks, "cpu", rank=job.rank)

    def on_written(layer: int, written: tuple[Written, ...]) -> None:
        seen.written.append((layer, written))
        job.hook(layer, end)

    Follower(loaded, cache).run(on_written)
    for layer in range(layout.num_layers):
        keys, values = cache.slots(layer)
        seen.layers.append((keys.numpy(), values.numpy()))


def _own_bytes() -> int:
    """Return how much memory this process has for itself: no page of a file counts."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
