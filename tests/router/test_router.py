"""Router.generate: one answer, whatever path it takes and whatever is lost on the way."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from router.config import Fallback
from router.router import continue_after
from tests.router.fakes import World, answer, colocated, disaggregated, fast_config, running
from tests.toys import request
from twinpool.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoWorkers,
    PromptTooLong,
    QueueFull,
    Unavailable,
    WorkerLost,
)
from twinpool.core.ports import Role
from twinpool.core.request import Request, TokenOutput

PROMPT = tuple(range(3, 40))


def ask_once(world: World, question: Request) -> list[int]:
    async def main() -> list[int]:
        async with running(world):
            ids = await world.ask(question)
            world.assert_at_rest()
            return ids

    return asyncio.run(main())


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 20])
def test_disaggregated_and_colocated_give_the_same_tokens(max_tokens: int) -> None:
    question = request(PROMPT, max_tokens=max_tokens)

    async def main() -> None:
        async with running(disaggregated()) as apart, running(colocated()) as together:
            assert await apart.ask(question) == await together.ask(question) == answer(question)
            apart.assert_at_rest()
            together.assert_at_rest()

    asyncio.run(main())


def test_a_timeline_tells_where_the_answer_was_made_and_what_was_moved() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            question = request(PROMPT)
            timeline = world.timeline(question)
            await world.ask_with(question, timeline)

            assert timeline.path == "disaggregated"
            assert (timeline.prefill_worker, timeline.decode_worker) == ("prefill-0", "decode-0")
            assert timeline.kv_bytes == len(PROMPT) * 128
            assert timeline.outcome == "length"
            names = [span.name for span in timeline.spans]
            assert names == ["queue", "reserve", "prefill", "decode", "transfer"]
            assert all(span.end_s is not None for span in timeline.spans)
            transfer = timeline.spans[-1]
            assert transfer.end_s is not None
            assert transfer.end_s - transfer.start_s == pytest.approx(0.25)
            assert [event.name for event in timeline.events] == ["first_token"]

    asyncio.run(main())


def test_one_token_uses_no_block_of_a_decode_worker() -> None:
    world = disaggregated()

    ids = ask_once(world, request(PROMPT, max_tokens=1))

    assert ids == answer(request(PROMPT, max_tokens=1))
    assert world.workers["decode-0"].calls == []


def test_the_last_token_of_a_continued_answer_needs_no_decode_worker() -> None:
    question = request(PROMPT, max_tokens=4)
    first_three = answer(question)[:3]

    async def main() -> None:
        async with running(disaggregated()) as world:
            continued = replace(question, output_ids=tuple(first_three))
            outputs = [o async for o in world.router.generate(continued, world.timeline(continued))]
            assert [(o.index, o.token_id) for o in outputs] == [(3, answer(question)[3])]
            assert world.workers["decode-0"].calls == []

    asyncio.run(main())


def test_a_continued_request_asks_for_what_follows_what_was_sent() -> None:
    question = request(PROMPT, max_tokens=8, num_prompt_logprobs=1)
    ids = answer(question)
    sent = [TokenOutput(index=i, token_id=ids[i]) for i in range(3)]

    continued = continue_after(question, sent, timeout_s=2.0)

    assert continued.prompt_ids == question.prompt_ids
    assert continued.output_ids == tuple(ids[:3])
    assert continued.timeout_s == 2.0
    assert continued.request_id != question.request_id
    assert continued.sampling == replace(question.sampling, num_prompt_logprobs=None)


def test_ids_of_two_attempts_differ_and_none_is_the_clients() -> None:
    question = request(PROMPT, request_id="from-the-client")

    ids = {continue_after(question, [], timeout_s=1.0).request_id for _ in range(10)}

    assert len(ids) == 10
    assert "from-the-client" not in ids


def test_a_first_token_that_ends_the_answer_gives_the_ticket_back_without_a_resume() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            worker = world.workers["prefill-0"]
            plain = worker._output
            worker._output = lambda r, ids: replace(  # type: ignore[method-assign]
                plain(r, ids), finish=plain(replace(r, sampling=replace(r.sampling, max_tokens=1)), ()).finish
            )
            assert await world.ask(request(PROMPT, max_tokens=9)) == answer(request(PROMPT, max_tokens=1))
            assert world.workers["decode-0"].calls == ["reserve", "reserved", "release"]
            world.assert_at_rest()

    asyncio.run(main())


def test_without_a_prefill_worker_the_decode_worker_answers_alone_and_it_is_counted() -> None:
    async def main() -> None:
        async with running(disaggregated(num_prefill=0)) as world:
            question = request(PROMPT)
            timeline = world.timeline(question)
            assert await world.ask_with(question, timeline) == answer(question)
            assert timeline.path == "local"
            assert [event.detail for event in timeline.events if event.name == "fallback"] == [
                {"reason": "no_prefill_worker"}
            ]
            assert 'twinpool_fallbacks_total{reason="no_prefill_worker"} 1.0' in metrics(world)

    asyncio.run(main())


def test_without_a_prefill_worker_a_router_told_to_refuse_waits_and_then_refuses() -> None:
    world = disaggregated(fast_config(fallback=Fallback.REFUSE, queue_timeout_s=0.05), num_prefill=0)

    with pytest.raises(NoWorkers, match="were not ready") as caught:
        ask_once(world, request(PROMPT))

    assert caught.value.retry_after_s == 5.0
    world.assert_at_rest()


def test_a_decode_worker_without_room_is_passed_over() -> None:
    async def main() -> None:
        async with running(disaggregated(num_decode=2)) as world:
            world.workers["decode-0"].free_blocks = 0
            world.workers["decode-1"].free_blocks = 3
            for _ in range(4):
                assert await world.ask(request(PROMPT)) == answer(request(PROMPT))
            assert "reserved" not in world.workers["decode-0"].calls
            world.workers["decode-0"].free_blocks = 32
            world.workers["decode-1"].free_blocks += 29
            world.assert_at_rest()

    asyncio.run(main())


def test_a_request_waits_for_blocks_and_does_not_spin() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            decode = world.workers["decode-0"]
            decode.free_blocks = 1
            waiting = asyncio.create_task(world.ask(request(PROMPT)))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            handle = world.pool.get("decode-0")
            assert handle is not None
            assert decode.calls.count("reserve") <= handle.num_heard + 1  # asked again at a heartbeat only
            decode.free_blocks = 32
            assert await waiting == answer(request(PROMPT))
            world.assert_at_rest()

    asyncio.run(main())


def test_a_request_that_finds_no_blocks_in_time_is_told_when_to_come_back() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(queue_timeout_s=0.1))) as world:
            world.workers["decode-0"].free_blocks = 1
            with pytest.raises(Unavailable, match=r"no worker had room within 0.1 s") as caught:
                await world.ask(request(PROMPT))
            assert caught.value.retry_after_s > 0
            world.workers["decode-0"].free_blocks = 32
            world.assert_at_rest()

    asyncio.run(main())


def test_a_request_that_can_never_fit_is_refused_before_a_worker_is_asked() -> None:
    world = disaggregated()

    with pytest.raises(PromptTooLong, match="300 tokens are more than the 256 that fit"):
        ask_once(world, request(tuple(range(200)), max_tokens=100))

    assert all(worker.calls == [] for worker in world.all_workers)


def test_a_prompt_is_sent_only_when_the_prefill_worker_can_start_it() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(prefill_depth=2))) as world:
            go = asyncio.Event()
            prefill = world.workers["prefill-0"]
            prefill.hooks["prefill"] = lambda: _wait(go)
            asking = [asyncio.create_task(world.ask(request(PROMPT))) for _ in range(6)]
            await asyncio.sleep(0.03)

            assert prefill.calls.count("prefill") == 2
            assert len(world.workers["decode-0"].reservations) == 2
            assert (world.router.num_in_flight, world.router.num_queued) == (2, 4)
            go.set()
            assert [await each for each in asking] == [answer(request(PROMPT))] * 6
            world.assert_at_rest()

    asyncio.run(main())


def test_a_full_line_refuses_at_once() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(prefill_depth=1, max_queued=2))) as world:
            go = asyncio.Event()
            world.workers["prefill-0"].hooks["prefill"] = lambda: _wait(go)
            asking = [asyncio.create_task(world.ask(request(PROMPT))) for _ in range(3)]
            await asyncio.sleep(0.02)
            with pytest.raises(QueueFull, match="2 requests wait already"):
                await world.ask(request(PROMPT))
            go.set()
            await asyncio.gather(*asking)
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("phase", ["reserve", "prefill", "resume", "token"])
def test_a_deadline_ends_the_wait_in_every_phase(phase: str) -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            for worker in world.all_workers:
                worker.hooks[phase] = worker.stall
            with pytest.raises(DeadlineExceeded):
                await world.ask(request(PROMPT, timeout_s=0.05))
            for worker in world.all_workers:
                worker.hooks.clear()
            await world.router.drain(timeout_s=1.0)
            world.assert_at_rest()

    asyncio.run(main())


def test_each_hop_is_told_how_much_time_is_left() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            decode = world.workers["decode-0"]
            decode.hooks["reserve"] = lambda: asyncio.sleep(0.05)
            await world.ask(request(PROMPT, timeout_s=10.0))
            at_reserve = decode.requests[0].timeout_s
            at_prefill = world.workers["prefill-0"].requests[0].timeout_s
            assert 9.0 < at_prefill <= at_reserve - 0.05 < 10.0

    asyncio.run(main())


def test_a_bad_request_found_by_a_worker_is_not_tried_again() -> None:
    async def main() -> None:
        async with running(disaggregated(num_prefill=2)) as world:

            async def refuse() -> None:
                raise InvalidRequest("logit_bias", "5 is not a token")

            for worker in world.all_workers:
                worker.hooks["prefill"] = refuse
            with pytest.raises(InvalidRequest, match="logit_bias: 5 is not a token"):
                await world.ask(request(PROMPT))
            calls = [world.workers[f"prefill-{i}"].calls.count("prefill") for i in range(2)]
            assert sum(calls) == 1
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("phase", ["reserve", "reserved", "prefill", "prefilled", "resume", "token"])
def test_a_client_that_is_cancelled_in_any_phase_leaves_nothing(phase: str) -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            reached = asyncio.Event()

            async def wait_here() -> None:
                reached.set()
                await asyncio.sleep(0.01)

            for worker in world.all_workers:
                worker.hooks[phase] = wait_here
            asking = asyncio.create_task(world.ask(request(PROMPT)))
            await reached.wait()
            asking.cancel()
            await asyncio.wait({asking})

            assert asking.cancelled()
            world.assert_at_rest()

    asyncio.run(main())


@pytest.mark.parametrize("num_read", [1, 2, 3])
@pytest.mark.parametrize("make", [disaggregated, colocated])
def test_a_client_that_leaves_frees_everything_before_aclose_returns(make: object, num_read: int) -> None:
    async def main() -> None:
        async with running(make()) as world:  # type: ignore[operator]
            question = request(PROMPT, max_tokens=50)
            timeline = world.timeline(question)
            async with aclosing(world.router.generate(question, timeline)) as outputs:
                for _ in range(num_read):
                    await anext(outputs)
                assert world.router.num_in_flight == 1
            world.assert_at_rest()
            assert timeline.outcome == "cancelled"

    asyncio.run(main())


def test_a_second_cancellation_does_not_stop_the_release() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            decode = world.workers["decode-0"]
            decoding, releasing, released = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def decode_for_ever() -> None:
                decoding.set()
                await decode.stall()

            async def release_slowly() -> None:
                releasing.set()
                await released.wait()

            decode.hooks |= {"token": decode_for_ever, "release": release_slowly}
            asking = asyncio.create_task(world.ask(request(PROMPT)))
            await decoding.wait()
            asking.cancel()
            await releasing.wait()
            asking.cancel()
            await asyncio.wait({asking})
            assert len(decode.reservations) == 1
            released.set()
            assert await world.router.drain(timeout_s=1.0)
            world.assert_at_rest()

    asyncio.run(main())


def test_a_release_that_is_never_answered_does_not_hold_the_client() -> None:
    async def main() -> None:
        async with running(disaggregated(fast_config(release_wait_s=0.05))) as world:
            decode = world.workers["decode-0"]
            decode.hooks["release"] = decode.stall
            started = world.clock.now_s()
            assert await world.ask(request(PROMPT)) == answer(request(PROMPT))
            assert world.clock.now_s() - started < world.config.release_timeout_s
            assert [handle.in_flight for handle in world.pool.handles] == [0, 1]
            assert await world.router.drain(timeout_s=5.0)
            assert [handle.in_flight for handle in world.pool.handles] == [0, 0]

    asyncio.run(main())


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            go = asyncio.Event()
            world.workers["decode-0"].hooks["token"] = lambda: _wait(go)
            asking = asyncio.create_task(world.ask(request(PROMPT)))
            await asyncio.sleep(0.01)
            assert world.router.is_ready
            draining = asyncio.create_task(world.router.drain(timeout_s=5.0))
            await asyncio.sleep(0)
            assert not world.router.is_ready
            with pytest.raises(Unavailable, match="takes nothing new"):
                await world.ask(request(PROMPT))
            assert not draining.done()
            go.set()
            assert await draining
            assert await asking == answer(request(PROMPT))

    asyncio.run(main())


def test_a_drain_that_takes_too_long_says_so() -> None:
    async def main() -> None:
        async with running(disaggregated()) as world:
            decode = world.workers["decode-0"]
            decode.hooks["token"] = decode.stall
            asking = asyncio.create_task(world.ask(request(PROMPT)))
            await asyncio.sleep(0.01)
            assert not await world.router.drain(timeout_s=0.05)
            asking.cancel()
            await asyncio.wait({asking})

    asyncio.run(main())


def test_prompt_logprobs_are_sent_once_though_the_prompt_is_computed_twice() -> None:
    async def main() -> None:
        async with running(disaggregated(num_decode=2)) as world:
            question = request(PROMPT, max_tokens=6, num_prompt_logprobs=0)
            kill_at_token(world, 3)
            outputs = [o async for o in world.router.generate(question, world.timeline(question))]
            assert [o.token_id for o in outputs] == answer(question)
            assert [o.prompt_logprobs is not None for o in outputs] == [True] + [False] * 5
            assert [r.sampling.num_prompt_logprobs for r in world.workers["prefill-0"].requests] == [0, None]

    asyncio.run(main())


def test_a_stream_that_ends_too_early_is_continued() -> None:
    async def main() -> None:
        async with running(colocated(num_workers=2)) as world:
            first = world.workers["colocated-0"]
            whole = first.generate

            async def cut(request: Request):  # type: ignore[no-untyped-def]
                async with aclosing(whole(request)) as outputs:
                    yield await anext(outputs)

            first.generate = cut  # type: ignore[method-assign]
            question = request(PROMPT)
            timeline = world.timeline(question)
            assert await world.ask_with(question, timeline) == answer(question)
            assert [e.detail["reason"] for e in timeline.events if e.name == "retry"] == ["WorkerLost"]
            world.assert_at_rest()

    asyncio.run(main())


def test_attempts_are_bounded() -> None:
    async def main() -> None:
        async with running(disaggregated(num_prefill=3, num_decode=3)) as world:

            async def fail() -> None:
                raise WorkerLost("prefill-x", "connection refused")

            for worker in world.all_workers:
                worker.hooks["prefill"] = fail
            with pytest.raises(WorkerLost, match="connection refused"):
                await world.ask(request(PROMPT))
            tried = [w.calls.count("prefill") for w in world.all_workers if w.info.role is Role.PREFILL]
            assert tried == [1, 1, 1]
            await asyncio.sleep(0.05)
            assert sum(w.calls.count("prefill") for w in world.all_workers) == 3
            world.assert_at_rest()

    asyncio.run(main())


def metrics(world: World) -> str:
    return world.router.metrics.render().decode()


def kill_at_token(world: World, number: int) -> None:
    """Kill the decode worker that is about to make the ``number``-th token of its streams."""
    for worker in world.all_workers:

        async def hook(worker=worker) -> None:  # type: ignore[no-untyped-def]
            if worker.calls.count("token") == number:
                worker.die()

        if worker.info.worker_id == "decode-0":
            worker.hooks["token"] = hook
        elif worker.info.role is Role.DECODE:
            worker.free_blocks -= 1  # so that decode-0 is asked first
            world.beat()
            worker.free_blocks += 1


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
