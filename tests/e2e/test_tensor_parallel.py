"""Workers of several ranks, in real processes: the same tokens, one life, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from tests.chaos.callers import Ask, Call, Caller
from tests.checkpoints_toy import make_checkpoint
from tests.cluster.by_hand import TWINPOOL, ByHand, by_hand
from tests.cluster.servers import PATIENCE_S, Server, all_gone, serving, terminate
from tests.engine.references import Reference
from tests.patience import until
from twinpool.checkpoints.resolve import resolve_model
from twinpool.cluster.private_ca import Wanted, make_files

KV_TOKEN_BYTES = 2 * 2 * 4 * 8 * 4  # layers, keys and values, KV heads, head dim, float32
MAX_TOKENS = 10
MEMORY = ("--kv-memory", "8MiB")
LONG = tuple(Ask(prompt=f"tell me story {number}", max_tokens=200) for number in range(3))
PROMPTS = tuple(
    Ask(prompt=tuple((i * i + 7 * number) % 256 for i in range(900)), max_tokens=20, is_new=True)
    for number in range(8)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 8 query and 4 KV heads."""
    return make_checkpoint(
        tmp_path_factory.mktemp("toy"), "llama", num_attention_heads=8, num_key_value_heads=4
    )


def tp(size: int, *options: str) -> Sequence[str]:
    return ("--tensor-parallel", str(size), *MEMORY, *options)


def asks_of_all_lengths() -> list[Ask]:
    rng = random.Random(7)
    lengths = [1, 2, 16, 17, 250, *(rng.randint(1, 250) for _ in range(7))]
    return [
        Ask(prompt=tuple(rng.randrange(256) for _ in range(length)), max_tokens=MAX_TOKENS)
        for length in lengths
    ]


def answers_of(deployment: ByHand, asks: Sequence[Ask]) -> list[list[int]]:
    calls = [deployment.caller.call(ask) for ask in asks]
    for call in calls:
        call.join()
        assert call.error is None and not call.broken, call.describe()
    return [call.ids for call in calls]


@pytest.mark.parametrize(
    ("prefill", "decode", "is_secured"),
    [
        (tp(2), tp(1), False),
        (tp(1, "--block-tokens", "32"), tp(2, "--block-tokens", "8"), False),
        (tp(2), tp(2), True),
        pytest.param(tp(4), tp(2), False, marks=pytest.mark.slow),
    ],
    ids=["2 to 1", "1 to 2", "2 to 2, secured", "4 to 2"],
)
def test_tokens_equal_transformers(
    model: Path, tmp_path: Path, prefill: Sequence[str], decode: Sequence[str], is_secured: bool
) -> None:
    options: Sequence[str] = ()
    if is_secured:
        make_files(tmp_path / "certs", Wanted())
        options = ("--certs", str(tmp_path / "certs"))
    asks = asks_of_all_lengths()
    reference = Reference(model)
    expected = [reference.answer(ask.prompt, max_tokens=MAX_TOKENS).output_ids for ask in asks]  # type: ignore[arg-type]

    with by_hand(
        model, {"prefill-0": prefill, "decode-0": decode}, folder=tmp_path, options=options
    ) as deployment:
        assert answers_of(deployment, asks) == expected

        caller = deployment.caller
        assert until(caller.is_clean, within_s=PATIENCE_S), caller.audit()
        moved = sum(len(ask.prompt) for ask in asks) * KV_TOKEN_BYTES
        for name in ("sent", "received"):  # by all ranks together
            metric = f"twinpool_worker_kv_{name}_bytes_total"
            assert until(lambda metric=metric: caller.metric(metric) == moved), caller.metric(metric)
        assert answers_of(deployment, asks) == expected
        assert until(caller.is_clean, within_s=PATIENCE_S), caller.audit()
        metric = "twinpool_worker_kv_received_bytes_total"
        assert until(lambda: moved < caller.metric(metric)), "nothing was sent"
        assert caller.metric(metric) < 2 * moved, "what the decode worker had was sent again"
        assert caller.metric("twinpool_retries_total") == caller.metric("twinpool_fallbacks_total") == 0
        ends = [(worker, worker.ranks()) for worker in deployment.workers.values()]
        for worker, _ in ends:
            worker.process.send_signal(signal.SIGTERM)
        for worker, ranks in ends:
            assert worker.process.wait(PATIENCE_S) == 0, worker.log.read_text()
            assert until(lambda ranks=ranks: all_gone(ranks), within_s=1.0)
            assert "Traceback" not in worker.log.read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a worker is hit in."""

    role: str
    asks: tuple[Ask, ...]
    begins: Callable[[ByHand, str, Sequence[Call]], None]


def generating(deployment: ByHand, worker_id: str, calls: Sequence[Call]) -> None:
    """Wait until a worker generates."""
    assert until(lambda: all(len(call.ids) > 5 for call in calls)), "no call streams"
    assert deployment.caller.audit()[worker_id]["sequences"], "the worker has nothing to do"


def sending(deployment: ByHand, worker_id: str, calls: Sequence[Call]) -> None:
    """Wait until a worker computes prompts and sends their KV."""

    def is_there() -> bool:
        return bool(deployment.caller.audit()[worker_id].get("transfers"))

    assert until(is_there, every_s=0.002), "the worker never sent anything"


GENERATING = Phase(role="decode", asks=LONG, begins=generating)
SENDING = Phase(role="prefill", asks=PROMPTS, begins=sending)


@pytest.fixture(scope="module")
def pairs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    """Two workers of each role, one with two ranks, that know the right answers."""
    in_small_steps = ("--max-chunk-tokens", "32")
    workers = {
        "prefill-0": tp(2, *in_small_steps),
        "prefill-1": tp(1, *in_small_steps),
        "decode-0": tp(2),
        "decode-1": tp(1),
    }
    with by_hand(
        model,
        workers,
        folder=tmp_path_factory.mktemp("logs"),
        server_options=("--set", "router.policy=round_robin"),
    ) as deployment:
        deployment.caller.learn([*LONG, *PROMPTS])
        yield deployment


@pytest.mark.parametrize("phase", [GENERATING, SENDING], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)],
    ids=["rank 1 killed", "rank 0 killed", "rank 1 frozen"],
)
def test_the_loss_of_a_rank_is_the_loss_of_its_worker_and_of_no_answer(
    pairs: ByHand, phase: Phase, rank: int, number: signal.Signals
) -> None:
    caller, victim = pairs.caller, f"{phase.role}-0"
    worker = pairs.workers[victim]
    ranks = worker.ranks()
    assert len(ranks) == 2
    calls = [caller.call(ask) for ask in phase.asks]
    phase.begins(pairs, victim, calls)

    os.kill(ranks[rank].pid, number)

    for call in calls:
        assert caller.is_right(call.join()), call.describe()
    assert worker.process.wait(PATIENCE_S) == (-signal.SIGKILL if rank == 0 else 2)
    with suppress(psutil.NoSuchProcess):
        ranks[1].resume()
    assert until(lambda: all_gone(ranks), within_s=5.0)
    assert until(lambda: victim not in caller.workers())
    assert until(caller.is_clean), caller.audit()
    if (rank, number) == (1, signal.SIGKILL):
        assert "rank 1: killed by SIGKILL" in worker.log.read_text()
    pairs.start_again(victim)
    assert caller.is_right(caller.call(phase.asks[0]).join())


def test_a_rank_that_is_asked_to_end_lets_its_worker_finish(pairs: ByHand) -> None:
    caller, worker = pairs.caller, pairs.workers["decode-0"]
    ranks = worker.ranks()
    calls = [caller.call(ask) for ask in LONG]
    generating(pairs, "decode-0", calls)
    retries = caller.metric("twinpool_retries_total")

    ranks[1].terminate()

    assert all(caller.is_right(call.join()) for call in calls)
    assert worker.process.wait(PATIENCE_S) == 0, worker.log.read_text()
    assert until(lambda: all_gone(ranks), within_s=1.0)
    assert caller.metric("twinpool_retries_total") == retries
    pairs.start_again("decode-0")


def test_nobody_else_can_be_a_rank_or_call_one_even_where_nothing_is_secured(pairs: ByHand) -> None:
    async def codes() -> dict[int, set[grpc.StatusCode]]:
        """What the ports answer to calls that only ranks may make."""
        found: dict[int, set[grpc.StatusCode]] = {port: set() for port in ports}
        for port in filter(speaks_http2, ports):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for name in ("Ranks/Join", "Rank/State", "Rank/Expect"):
                    found[port].add(await code_of(channel.unary_unary(f"/twinpool.v1.{name}")))
        return found

    listening = [
        each.laddr
        for rank in pairs.workers["decode-0"].ranks()
        for each in rank.net_connections(kind="inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    ports = {address.port for address in listening}

    answers = asyncio.run(codes())

    assert not any(grpc.StatusCode.OK in codes for codes in answers.values()), answers
    # The doors of rank 0 for ranks, and of rank 1 for rank 0; the other ports know no such call, or no gRPC.
    assert list(answers.values()).count({grpc.StatusCode.UNAUTHENTICATED}) == 2, answers


def speaks_http2(port: int) -> bool:
    """Whether who listens there begins with a SETTINGS frame, as gRPC does; others wait for the caller."""
    with socket.create_connection(("127.0.0.1", port), timeout=2.0) as connection:
        try:
            return connection.recv(9)[3:4] == b"\x04"
        except TimeoutError:
            return False


async def code_of(method: Any) -> grpc.StatusCode:
    try:
        await method(b"", timeout=60.0)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        (tp(3), "tensor_parallel: 3 ranks"),
        (("--tensor-parallel", "2", "--kv-memory", "2KiB"), "--kv-memory: 1024 bytes hold 0 blocks of"),
    ],
)
def test_what_ranks_cannot_do_is_told_in_one_line(
    model: Path, tmp_path: Path, own: Sequence[str], problem: str
) -> None:
    done = subprocess.run(
        [*TWINPOOL, "worker", "--role", "decode", "--join", "127.0.0.1:1", "--model", str(model), *own],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert done.returncode in (1, 2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("twinpool: error: ") and problem in last, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_ranks_of_a_real_model_give_its_tokens(tmp_path: Path) -> None:
    """SmolLM2 has 9 query and 3 KV heads."""
    folder = resolve_model("smollm2-135m-instruct", progress=lambda text: None)
    asks = [Ask(prompt=text, max_tokens=16) for text in ("Once upon a time", "The capital of France is")]
    memory = ("--kv-memory", "96MiB")
    workers = {"prefill-0": tp(3, *memory), "decode-0": tp(1, *memory)}
    with by_hand(folder, workers, folder=tmp_path) as deployment:
        split = answers_of(deployment, asks)
        assert until(deployment.caller.is_clean)
    with by_hand(
        folder, {"colocated-0": tp(1, *memory)}, folder=tmp_path, server_options=("--colocated", "1")
    ) as deployment:
        assert answers_of(deployment, asks) == split


def test_ray_starts_replaces_and_ends_all_ranks_of_a_worker(model: Path) -> None:
    with serving(model, "--decode-tensor-parallel", "2") as server:
        caller = Caller(server.client)
        ask = Ask(prompt="hello", max_tokens=8)
        caller.learn([ask])
        first = caller.workers()["decode-0"]
        assert len(first["ranks"]) == 2
        (rank_1,) = ranks_of("decode-0", server)

        rank_1.kill()

        def is_replaced() -> bool:
            now = caller.workers().get("decode-0")
            return now is not None and now["generation"] > first["generation"] and now["state"] == "ready"

        assert until(is_replaced, within_s=PATIENCE_S)
        assert not psutil.pid_exists(first["pid"])
        assert len(ranks_of("decode-0", server)) == 1
        (report,) = [
            each
            for each in server.client.get("/admin/deployment")["workers"]
            if each["worker_id"] == "decode-0"
        ]
        assert report["num_failures"] == 1
        assert report["last_failure"].startswith("rank 1: killed by SIGKILL")
        assert caller.is_right(caller.call(ask).join())

        started = server.descendants()
        assert terminate(server) == 0
        assert until(lambda: all_gone(started), within_s=1.0)
        assert list(server.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_an_actor_replaces_all_ranks(model: Path, rank: int) -> None:
    with serving(model, "--decode-tensor-parallel", "2") as server:
        caller = Caller(server.client)
        caller.learn(LONG)
        first = caller.workers()["decode-0"]
        pid = first["pid"] if rank == 0 else ranks_of("decode-0", server)[0].pid
        actor = psutil.Process(pid).parent()
        assert actor is not None and "Actor" in actor.cmdline()[0]
        calls = [caller.call(ask) for ask in LONG]
        assert until(lambda: all(len(call.ids) > 5 for call in calls))

        actor.kill()

        assert all(caller.is_right(call.join()) for call in calls), [call.describe() for call in calls]

        def is_replaced() -> bool:
            now = caller.workers().get("decode-0")
            return now is not None and now["generation"] > first["generation"] and now["state"] == "ready"

        assert until(is_replaced, within_s=PATIENCE_S)
        assert until(lambda: not psutil.pid_exists(first["pid"]))
        assert until(lambda: len(ranks_of("decode-0", server)) == 1)
        assert caller.is_right(caller.call(LONG[0]).join())
        started = server.descendants()
        assert terminate(server) == 0
        assert until(lambda: all_gone(started), within_s=1.0)


@pytest.mark.slow
def test_ranks_that_lose_ray_go_on_until_their_successors_join(model: Path) -> None:
    with serving(model, "--prefill-tensor-parallel", "2") as server:
        caller = Caller(server.client)
        ask = Ask(prompt="hello", max_tokens=8, is_new=True)
        caller.learn([ask])
        first = caller.workers()
        ranks = ranks_of("prefill-0", server)
        (raylet,) = [process for process in server.descendants() if process.name() == "raylet"]

        raylet.kill()
        calls = []

        def are_succeeded() -> bool:
            calls.append(caller.call(ask).join())
            now = caller.workers()
            return all(now.get(name, first[name])["generation"] > first[name]["generation"] for name in first)

        assert until(are_succeeded, within_s=PATIENCE_S)
        assert all(caller.is_right(call) for call in calls)
        assert until(lambda: all_gone(ranks))
        assert len(ranks_of("prefill-0", server)) == 1
        started = server.descendants()
        assert terminate(server) == 0
        assert until(lambda: all_gone(started), within_s=1.0)
        assert list(server.folder.iterdir()) == []


def ranks_of(worker_id: str, server: Server) -> list[psutil.Process]:
    """Return the processes of a worker's ranks but rank 0."""
    found = []
    for process in server.descendants():
        with suppress(psutil.Error):  # it has just ended
            line = process.cmdline()
            if "twinpool.cluster.rank_process" in line and line[-1].startswith(f"{worker_id}/"):
                found.append(process)
    return found
