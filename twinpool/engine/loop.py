"""The asyncio face of an engine: one thread runs the steps, coroutines ask and listen.

Everything an engine does happens in its thread, in a step or between two.  What a coroutine wants is a
command in a queue; answers and tokens come back through the event loop's ``call_soon_threadsafe``.
Nothing here makes the event loop wait for the thread.  Knows no model and no wire.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from twinpool.core.clock import Clock
from twinpool.core.errors import InternalError, RankLost, RequestCancelled, ServingError, WorkerDraining
from twinpool.core.ports import BlockCounts, WorkerLoad
from twinpool.core.request import Request, TokenOutput
from twinpool.engine.engine import Engine
from twinpool.engine.sequence import SequenceState, SequenceStatus

OnWritten = Callable[[int, int], None]
"""``(layer, num_tokens)``: the KV of tokens ``[0, num_tokens)`` of ``layer`` is in the cache."""

IDLE_S = 0.05  # how often the thread looks at deadlines while nothing can run
JOIN_S = 1.0  # how long a thread may take from its last statement to its end

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAudit:
    """The engine's books, taken between two steps."""

    blocks: BlockCounts
    sequences: int


class SequenceHandle:
    """One sequence as the event loop sees it; only ``EngineLoop`` makes one.

    Attributes:
        request: What was asked.
        blocks: Numbers of its blocks by token position; set from ``reserve`` or from the first
            ``on_written`` on, and fixed as long as a transfer may touch them.
        cached_tokens: The first tokens of a reservation, whose KV is in its blocks already.
    """

    def __init__(
        self,
        request: Request,
        *,
        abandon: Callable[[SequenceHandle], None],
        on_written: OnWritten | None = None,
    ) -> None:
        self.request = request
        self.blocks: tuple[int, ...] = ()
        self.cached_tokens = 0
        self._abandon = abandon
        self._on_written = on_written
        self._early: list[Callable[[], None]] | None = []  # None once the caller holds the handle
        self._events: asyncio.Queue[TokenOutput | ServingError] = asyncio.Queue()
        self._is_over = False  # nothing comes after what is in the queue

    async def outputs(self) -> AsyncGenerator[TokenOutput, None]:
        """Give the tokens as they come; one that decodes elsewhere gives its first token only.

        Closing or cancelling it before its end aborts the sequence.

        Raises:
            ServingError: What ended the sequence instead of a finish.
        """
        is_complete = False
        try:
            while not is_complete:
                event = await self._events.get()
                if isinstance(event, ServingError):
                    is_complete = True
                    raise event
                is_complete = event.finish is not None or self._on_written is not None
                yield event
        finally:
            if not is_complete:
                self._abandon(self)

    def put(self, event: TokenOutput | ServingError) -> None:
        """Give the consumer an event; what comes after an end is dropped."""
        if self._early is not None:
            self._early.append(lambda: self.put(event))
        elif not self._is_over:
            self._is_over = isinstance(event, ServingError) or event.finish is not None
            self._events.put_nowait(event)

    def write(self, layer: int, num_tokens: int, blocks: tuple[int, ...]) -> None:
        """Tell the listener what was written; after an end it is not told."""
        if self._early is not None:
            self._early.append(lambda: self.write(layer, num_tokens, blocks))
        elif self._on_written is not None and not self._is_over:
            self.blocks = blocks
            try:
                self._on_written(layer, num_tokens)
            except Exception as error:  # noqa: BLE001 - a broken listener ends its own sequence only
                _log.exception("on_written of %s failed", self.request.request_id)
                self.put(InternalError(f"on_written failed: {type(error).__name__}"))
                self._abandon(self)

    def hand_over(self) -> None:
        """Pass on what came before the caller held the handle, and everything from now on."""
        early, self._early = self._early or [], None
        for event in early:
            event()


class EngineLoop:
    """Owns an engine and the one thread that may touch it; used from one event loop.

    Whoever reserved, or gave ``on_written``, calls ``drained`` in the end, whatever happened: until then
    the engine keeps the blocks, since a transfer may still touch them.

    Args:
        engine: Handed over; nobody else touches it from ``start`` on.
        clock: Tells how long a step takes already.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._clock = clock
        self._calls: set[asyncio.Future[Any]] = set()  # not answered yet
        self._is_draining = False
        self._is_closed = False
        self._failure: InternalError | None = None
        self._failed = asyncio.Event()
        self._thread_ended = asyncio.Event()
        self._steps = _StepThread(engine, clock)

    async def start(self) -> None:
        """Start the thread; its answers go to the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._steps.start(self._event_loop, on_end=self._on_thread_end)

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """End the thread after its current step; what is open then fails with WorkerDraining.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._steps.is_started:
            self._steps.stop()
            try:
                await asyncio.wait_for(self._thread_ended.wait(), timeout_s)
            except TimeoutError:
                _log.warning("the engine thread is still in a step after %g s", timeout_s)
            else:
                self._steps.join(JOIN_S)
        self._fail_all(lambda: WorkerDraining("the worker shuts down"))

    async def failed(self) -> InternalError:
        """Wait until the engine thread dies of a bug and return it; the process should end then."""
        await self._failed.wait()
        assert self._failure is not None, "a failure is known before it is signalled"
        return self._failure

    async def submit(self, request: Request, *, on_written: OnWritten | None = None) -> SequenceHandle:
        """Compute a prompt; with ``on_written`` it decodes elsewhere and gives one token here.

        ``on_written`` is called in the event loop's thread after each layer of each step of the sequence,
        with a number of tokens that never goes down; never before this call has returned to a coroutine
        that awaits it directly, and not after the sequence has ended.  If the call is cancelled, the
        sequence is gone and ``on_written`` is never called.

        Raises:
            InvalidRequest, PromptTooLong, QueueFull: As ``Engine.submit``.
            WorkerDraining: Nothing new is taken.
        """
        handle = SequenceHandle(request, abandon=self.abandon, on_written=on_written)
        await self._open(
            handle,
            lambda engine: engine.submit(request, has_destination=on_written is not None),
        )
        return handle

    async def reserve(self, request: Request) -> SequenceHandle:
        """Take room for KV that is computed elsewhere; its block numbers are in ``SequenceHandle.blocks``.

        Raises:
            InvalidRequest, PromptTooLong, NoFreeBlocks: As ``Engine.reserve``.
            WorkerDraining: Nothing new is taken.
        """
        handle = SequenceHandle(request, abandon=self.abandon)
        await self._open(handle, lambda engine: engine.reserve(request))
        return handle

    async def arrived(self, handle: SequenceHandle, first: TokenOutput) -> None:
        """Start to decode a reserved sequence; its outputs begin with the token after ``first``.

        Raises:
            InternalError, DeadlineExceeded, RequestCancelled: As ``Engine.arrived``.
        """
        await self._call(lambda: self._steps.arrived(handle, first))

    async def abort(self, handle: SequenceHandle) -> None:
        """End a sequence; returns once the engine did it.  Idempotent, and harmless after ``close``."""
        if not self._is_over:
            await self._call(lambda: self._steps.abort(handle))

    async def drained(self, handle: SequenceHandle) -> None:
        """Give back the blocks of a sequence that no transfer touches any more.  As harmless as ``abort``.

        One that still lived by its transfer is aborted; one that decodes here is left alone.
        """
        if not self._is_over:
            await self._call(lambda: self._steps.drained(handle))

    def abandon(self, handle: SequenceHandle) -> None:
        """As ``abort``, but without waiting for the engine."""
        if not self._is_over:
            self._steps.post(_Command(lambda: self._steps.abort(handle)))

    async def audit(self) -> EngineAudit:
        """Return the engine's books as they are between two steps."""
        return await self._call(self._steps.audit)

    async def clear_cache(self) -> int:
        """Forget all KV that could be used again; return how many cached blocks became free."""
        return await self._call(self._steps.clear_cache)

    def load(self) -> WorkerLoad:
        """Return the engine's state after its latest step, at once, whatever the thread is doing."""
        is_dead = self._failure is not None
        is_busy = self._steps.is_busy or is_dead
        stalled_s = max(0.0, self._clock.now_s() - self._steps.seen_s) if is_busy else 0.0
        return replace(self._steps.load, draining=self._is_draining or is_dead, stalled_s=stalled_s)

    def start_draining(self) -> None:
        """Take nothing new from now on; what is here goes on."""
        self._is_draining = True

    async def wait_idle(self, *, timeout_s: float) -> bool:
        """Wait until no sequence is left, receiving and draining ones included; return whether none is."""
        try:
            await asyncio.wait_for(self._idle(), timeout_s)
        except TimeoutError:
            return False
        return True

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._failure is not None

    async def _open(self, handle: SequenceHandle, make: Callable[[Engine], SequenceState]) -> None:
        if self._is_draining:
            raise WorkerDraining("this worker takes nothing new")
        try:
            await self._call(lambda: self._steps.open(handle, make))
        except asyncio.CancelledError:
            self._steps.post(_Command(lambda: self._steps.discard(handle)))
            raise
        self._event_loop.call_soon(handle.hand_over)

    async def _idle(self) -> None:
        future: asyncio.Future[None] = self._event_loop.create_future()
        self._calls.add(future)
        try:
            await self._call(lambda: self._steps.answer_when_idle(future))
            await future
        finally:
            self._calls.discard(future)

    async def _call(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the engine's thread, between two steps, and return its result."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        if self._is_closed:
            raise WorkerDraining("the worker shuts down")
        future: asyncio.Future[T] = self._event_loop.create_future()
        self._calls.add(future)
        self._steps.post(_Command(action, future))
        try:
            return await future
        finally:
            self._calls.discard(future)

    def _on_thread_end(self, failure: InternalError | None) -> None:
        self._thread_ended.set()
        if failure is not None:
            self._failure = failure
            self._failed.set()
            self._fail_all(lambda: type(failure)(str(failure)))

    def _fail_all(self, make_error: Callable[[], ServingError]) -> None:
        """End everything that is open; the thread answers nothing any more."""
        for handle in self._steps.open_handles():
            handle.put(make_error())
        for future in list(self._calls):
            if not future.done():
                future.set_exception(make_error())


@dataclass(frozen=True, slots=True)
class _Command:
    action: Callable[[], object]  # runs in the engine's thread
    future: asyncio.Future[Any] | None = None  # gets its result or its ServingError


@dataclass(frozen=True, slots=True)
class _Answer:
    future: asyncio.Future[Any] | None
    value: object = None
    error: ServingError | None = None


class _StepThread:
    """The engine's thread and all that lives in it.

    Attributes:
        load: State after the latest step; replaced as a whole, so the event loop may read it.
        seen_s: When the thread was last between two steps.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.load = WorkerLoad(free_blocks=engine.num_free_blocks)
        self.seen_s = clock.now_s()
        self._engine = engine
        self._clock = clock
        self._has_work = False
        self._is_moving = False  # the latest step ran something, so the next one is due at once
        self._busy_s = 0.0  # in steps that ran something, since the start
        self._sequences: dict[SequenceHandle, SequenceState] = {}  # live ones only
        self._handles: dict[int, SequenceHandle] = {}  # the same by number
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._wake = threading.Condition()  # guards the two below
        self._commands: list[_Command] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called in the event loop's thread.

    def start(
        self, event_loop: asyncio.AbstractEventLoop, *, on_end: Callable[[InternalError | None], None]
    ) -> None:
        self._event_loop = event_loop
        self._on_end = on_end
        self.seen_s = self._clock.now_s()
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def post(self, command: _Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def is_busy(self) -> bool:
        return self._has_work or bool(self._commands)

    def open_handles(self) -> list[SequenceHandle]:
        return list(self._handles.values())

    # Called in the engine's thread, as commands.

    def open(self, handle: SequenceHandle, make: Callable[[Engine], SequenceState]) -> None:
        sequence = make(self._engine)
        handle.blocks = tuple(sequence.blocks)
        handle.cached_tokens = sequence.num_cached_tokens
        self._sequences[handle] = sequence
        self._handles[sequence.number] = handle

    def arrived(self, handle: SequenceHandle, first: TokenOutput) -> None:
        sequence = self._sequences.get(handle)
        if sequence is None:
            raise RequestCancelled("the reservation is over")
        self._engine.arrived(sequence, first)

    def abort(self, handle: SequenceHandle) -> None:
        self._end(handle, self._engine.abort)

    def drained(self, handle: SequenceHandle) -> None:
        self._end(handle, self._engine.drained)

    def discard(self, handle: SequenceHandle) -> None:
        """End a sequence that its caller never got, so that no transfer knows its blocks."""
        self.abort(handle)
        self.drained(handle)

    def audit(self) -> EngineAudit:
        return EngineAudit(blocks=self._engine.counts(), sequences=self._engine.num_sequences)

    def clear_cache(self) -> int:
        return self._engine.clear_cache()

    def answer_when_idle(self, future: asyncio.Future[None]) -> None:
        self._idle_waiters.append(future)

    def _end(self, handle: SequenceHandle, end: Callable[[SequenceState], None]) -> None:
        sequence = self._sequences.get(handle)
        if sequence is None:
            return
        end(sequence)
        if sequence.status in (SequenceStatus.DRAINING, SequenceStatus.FINISHED):
            self._tell(handle.put, RequestCancelled("the sequence was aborted"))
        self._forget_if_finished(handle, sequence)

    def _forget_if_finished(self, handle: SequenceHandle, sequence: SequenceState) -> None:
        if sequence.status is SequenceStatus.FINISHED:
            del self._sequences[handle]
            del self._handles[sequence.number]

    # The thread itself.

    def _run(self) -> None:
        failure: InternalError | None = None
        try:
            while self._turn():
                pass
        except RankLost as error:
            _log.error("the engine ended: %s", error)
            failure = RankLost(str(error))
        except Exception as error:  # noqa: BLE001 - the top of the engine's thread
            _log.exception("the engine thread died")
            failure = InternalError(f"the engine died: {type(error).__name__}: {error}")
        self._tell(self._on_end, failure)

    def _turn(self) -> bool:
        """Obey the commands, then run one step; return whether to go on."""
        with self._wake:
            if not (self._commands or self._is_stopping or self._is_moving):
                self._wake.wait(IDLE_S)
            if self._is_stopping:
                return False
            self.seen_s = self._clock.now_s()
            commands, self._commands = self._commands, []
            self._has_work = self._has_work or bool(commands)
        if commands:
            self._tell(_answer_all, [_obey(command) for command in commands])
        self._step()
        self._publish()
        return True

    def _step(self) -> None:
        began_s = self._clock.now_s()
        result = self._engine.step(self._written)
        self._is_moving = result.num_items > 0
        if self._is_moving:
            self._busy_s += self._clock.now_s() - began_s
        pairs: list[tuple[SequenceState, TokenOutput | ServingError]] = [*result.outputs, *result.failed]
        events: list[tuple[SequenceHandle, TokenOutput | ServingError]] = []
        for sequence, event in pairs:
            handle = self._handles[sequence.number]
            events.append((handle, event))
            self._forget_if_finished(handle, sequence)
        if events:
            self._tell(_put_all, events)

    def _written(self, layer: int, written: Sequence[tuple[SequenceState, int]]) -> None:
        writes = [
            (self._handles[sequence.number], num_tokens, tuple(sequence.blocks))
            for sequence, num_tokens in written
        ]
        self._tell(_write_all, layer, writes)

    def _publish(self) -> None:
        engine = self._engine
        self.load = WorkerLoad(
            running=engine.num_sequences - engine.num_waiting,
            queued=engine.num_waiting,
            free_blocks=engine.num_free_blocks,
            counters={**engine.counters, "busy_us": round(self._busy_s * 1e6)},
        )
        self.seen_s = self._clock.now_s()
        self._has_work = engine.has_work
        if self._idle_waiters and engine.num_sequences == 0:
            self._tell(_answer_all, [_Answer(waiter) for waiter in self._idle_waiters])
            self._idle_waiters = []

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        """Call ``callback`` in the event loop's thread, soon; if that loop is gone the thread ends too."""
        try:
            self._event_loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._is_stopping = True


def _obey(command: _Command) -> _Answer:
    try:
        return _Answer(command.future, value=command.action())
    except ServingError as error:
        return _Answer(command.future, error=error)


def _answer_all(answers: Sequence[_Answer]) -> None:
    for answer in answers:
        if answer.future is None or answer.future.done():
            continue
        if answer.error is None:
            answer.future.set_result(answer.value)
        else:
            answer.future.set_exception(answer.error)


def _put_all(events: Sequence[tuple[SequenceHandle, TokenOutput | ServingError]]) -> None:
    for handle, event in events:
        handle.put(event)


def _write_all(layer: int, writes: Sequence[tuple[SequenceHandle, int, tuple[int, ...]]]) -> None:
    for handle, num_tokens, blocks in writes:
        handle.write(layer, num_tokens, blocks)
