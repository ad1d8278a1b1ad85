"""Metrics, the request log and the audit: they tell what happened, exactly."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import aclosing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.config import RouterConfig
from router.log import RequestLog
from tests.router.fakes import World, answer, disaggregated, fast_config, running
from tests.toys import request
from twinpool.core.clock import ManualClock
from twinpool.core.errors import ConfigError, InternalError
from twinpool.core.ports import Role
from twinpool.core.timeline import RequestTimeline

PROMPT = tuple(range(20))


def samples(world: World) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(world.router.metrics.render().decode())
        for sample in family.samples
    }


def test_counters_equal_what_clients_saw() -> None:
    chance = random.Random(5)
    seen = {"length": 0, "cancelled": 0, "stop": 0, "InternalError": 0, "tokens": 0, "prompts": 0}

    async def client(world: World) -> None:
        question = request(PROMPT[: chance.randrange(1, 20)], max_tokens=chance.randrange(2, 9))
        timeline = world.timeline(question)
        stop_after = chance.choice([None, 1, 2])
        received = 0
        try:
            async with aclosing(world.router.generate(question, timeline)) as outputs:
                async for _ in outputs:
                    received += 1
                    if received == stop_after:
                        if chance.random() < 0.5:
                            timeline.outcome = "stop"  # as one does who found a stop string
                        break
        except InternalError:
            pass
        assert timeline.outcome is not None
        seen[timeline.outcome] += 1
        seen["tokens"] += received
        seen["prompts"] += len(question.prompt_ids) if received else 0

    async def sometimes_fail() -> None:
        if chance.random() < 0.1:
            raise InternalError("a bug")

    async def main() -> None:
        async with running(disaggregated()) as world:
            world.workers["prefill-0"].hooks["prefill"] = sometimes_fail
            for _ in range(10):
                await asyncio.gather(*(client(world) for _ in range(10)))
            values = samples(world)

        by_outcome = {
            outcome: sum(v for (name, labels), v in values.items() if name == "twinpool_requests_total"
                         and labels[0] == outcome)
            for outcome in ("length", "cancelled", "stop", "InternalError")
        }  # fmt: skip
        assert by_outcome == {k: v for k, v in seen.items() if k not in {"tokens", "prompts"}}
        assert sum(by_outcome.values()) == 100
        assert all(by_outcome.values()), "an outcome was not exercised"
        assert values["twinpool_generated_tokens_total", ()] == seen["tokens"]
        assert values["twinpool_prompt_tokens_total", ()] == seen["prompts"]
        finished = seen["length"] + seen["stop"]
        assert values["twinpool_request_seconds_count", ()] == finished
        assert values["twinpool_queued_requests", ()] == 0
        assert values["twinpool_in_flight_requests", ()] == 0

    asyncio.run(main())


def test_workers_are_shown_while_they_live_with_what_they_say() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            await world.ask(request(PROMPT))
            world.beat()
            values = samples(world)
            steps = len(world.workers["decode-0"].calls)
            assert values["twinpool_workers", ("decode", "ready")] == 1
            assert values["twinpool_worker_steps_total", ("decode-0",)] == steps > 0
            assert values["twinpool_worker_free_blocks", ("decode-0",)] == 32
            assert values["twinpool_worker_in_flight", ("decode-0",)] == 0
            assert values["twinpool_kv_bytes_total", ()] == 20 * 128
            world.workers["decode-0"].die()
            assert not [labels for _, labels in samples(world) if "decode-0" in labels]

    asyncio.run(main())


def test_the_log_shows_a_request_in_its_public_shape() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            question = request(PROMPT, request_id="cmpl-1")
            assert await world.ask(question) == answer(question)
            shown = world.router.log.get("cmpl-1")

        assert shown is not None
        assert json.loads(json.dumps(shown)) == shown
        assert shown["id"] == "cmpl-1"
        assert (shown["path"], shown["prefill_worker"], shown["decode_worker"]) == (
            "disaggregated",
            "prefill-0",
            "decode-0",
        )
        assert (shown["kv_bytes"], shown["cached_tokens"]) == (20 * 128, 0)
        spans, events = shown["spans"], shown["events"]
        assert isinstance(spans, list) and isinstance(events, list)
        assert [span["name"] for span in spans] == ["queue", "reserve", "prefill", "decode", "transfer"]
        assert all(span["start_s"] <= span["end_s"] for span in spans)
        assert [event["name"] for event in events] == ["first_token"]

    asyncio.run(main())


def test_cached_tokens_are_those_that_whoever_gave_the_first_token_did_not_compute() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            prefill, decode = world.workers["prefill-0"], world.workers["decode-0"]
            prefill.cached_tokens, decode.cached_tokens = 16, 99
            decode.forged = {"cached_tokens": 12}
            await world.ask(request(PROMPT, request_id="twice"))
            await world.ask(request(PROMPT, request_id="once", max_tokens=1))
            shown = [world.router.log.get(name) for name in ("twice", "once")]

        assert [story and story["cached_tokens"] for story in shown] == [16, 16]
        assert shown[0] is not None and isinstance(shown[0]["spans"], list)
        (reserve,) = (span for span in shown[0]["spans"] if span["name"] == "reserve")
        assert reserve["cached_tokens"] == 12  # not sent

    asyncio.run(main())


def test_the_log_forgets_the_oldest_request() -> None:
    log = RequestLog(max_requests=2)
    for name in ("a", "b", "a", "c"):
        log.add(RequestTimeline(name, ManualClock()))

    assert log.get("b") is None
    assert [log.get(name) is not None for name in ("a", "c")] == [True, True]


def test_an_audit_shows_the_books_of_every_worker() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            assert await world.router.audit() == {
                "ok": True,
                "workers": [
                    {
                        "id": name,
                        "role": role,
                        "blocks": {"total": 32, "free": 32, "cached": 0, "owned": 0, "draining": 0},
                        "tickets": 0,
                        "transfers": 0,
                        "sequences": 0,
                    }
                    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"))
                ],
                "router": {"in_flight": 0, "queued": 0},
            }

    asyncio.run(main())


def test_an_audit_fails_when_blocks_do_not_add_up_or_a_worker_is_silent() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(lost_after_s=60.0))) as world:
            world.workers["prefill-0"].audit_error = 1
            world.workers["decode-0"].freeze()
            books = await world.router.audit()
            assert books["ok"] is False
            workers = books["workers"]
            assert isinstance(workers, list)
            assert workers[0]["error"] == "33 blocks are accounted for, 32 exist"
            assert workers[1]["error"].startswith("no answer within 0.2 s")

    asyncio.run(main())


def test_an_audit_tells_of_what_runs_now() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            question = request(PROMPT, max_tokens=50)
            async with aclosing(world.router.generate(question, world.timeline(question))) as outputs:
                await anext(outputs)
                books = await world.router.audit()
                assert books["router"] == {"in_flight": 1, "queued": 0}
                workers = books["workers"]
                assert isinstance(workers, list)
                assert [worker["tickets"] for worker in workers] == [0, 1]
                assert workers[1]["blocks"]["owned"] == 2
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_attempts": 0}, "router.max_attempts: 0 is less than 1"),
        ({"queue_timeout_s": 0.0}, "router.queue_timeout_s: 0.0 is not above 0"),
        ({"audit_timeout_s": 0.0}, "router.audit_timeout_s: 0.0 is not above 0"),
        ({"overtake_s": -1.0}, "router.overtake_s: -1.0 is less than 0"),
        ({"lost_after_s": 0.6}, "router.lost_after_s: 0.6 is less than two heartbeats of 0.5"),
    ],
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**changes)  # type: ignore[arg-type]


def test_the_first_worker_of_a_colocated_deployment_is_enough() -> None:
    async def main() -> None:
        async with running(World(fast_config(), needs_prefill=False)) as world:
            world.join(Role.COLOCATED)
            assert world.router.is_ready

    asyncio.run(main())
