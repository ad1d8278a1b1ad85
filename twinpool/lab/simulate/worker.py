"""A worker under virtual time: the live engine, told when each of its steps ends.

As in the live worker's thread, a step that runs is not disturbed: what comes meanwhile is obeyed between two
steps.  Steps that only give each decoding sequence a token are not made one by one: the engine says how many
follow each other (``Engine.steady_steps``), the cost model on which line their times lie, and they are booked
together (``Engine.decode_ahead``) once something happens.

    idle --post--> turn --> step ---ends---> commands, turn
                      `---> run of steady steps --ends, or is cut after the step that runs--> commands, turn
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, sqrt
from typing import Protocol

from twinpool.core.errors import ConfigError, ServingError
from twinpool.core.ports import WorkerInfo, WorkerLoad
from twinpool.core.request import TokenOutput
from twinpool.engine.engine import Engine
from twinpool.engine.scheduler import StepResult
from twinpool.engine.sequence import SequenceState
from twinpool.lab.profile.cost import CostModel
from twinpool.lab.simulate.config import LONGEST_S
from twinpool.lab.simulate.cost_runner import TOKEN, CostRunner, Prompt
from twinpool.lab.simulate.link import SharedLink
from twinpool.lab.simulate.machine import Machine
from twinpool.lab.simulate.timetable import Timetable
from twinpool.lab.simulate.token_times import TokenTimes

Command = Callable[[], None]


class Client(Protocol):
    """Who wants to know what becomes of one sequence."""

    times: TokenTimes

    def computes(self, prompt: Prompt, *, start_s: float, end_s: float) -> None:
        """A step that computes a part of its prompt has begun."""
        ...

    def computed(self, prompt: Prompt) -> None:
        """That step has ended."""
        ...

    def gave(self, output: TokenOutput) -> None:
        """It has a token now, out of a step that was not steady."""
        ...

    def ended(self) -> None:
        """Its last token came."""
        ...

    def failed(self, error: ServingError) -> None:
        """The engine gave it up."""
        ...


class SimulatedWorker:
    """One life of one worker.

    Args:
        info: What it says of itself when it joins.
        engine: Its engine, over ``runner``.
        runner: Tells the time of each step.
        cost: The same times, of steady steps.
        bytes_s: Of its network, each way.
        shares_prefixes: Whether the engine looks for them.
        reserves_at_once: A reservation does not wait for the step that runs; no live worker is like that.
        timetable: Of the simulation.
        machine: On which it computes beside others; None: on one of its own.

    Attributes:
        kv_bytes_in, kv_bytes_out: KV that came and left.
    """

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        *,
        runner: CostRunner,
        cost: CostModel,
        bytes_s: float,
        shares_prefixes: bool,
        reserves_at_once: bool = False,
        timetable: Timetable,
        machine: Machine | None = None,
    ) -> None:
        self.info = info
        self.engine = engine
        self.link_in = SharedLink(bytes_s)
        self.link_out = SharedLink(bytes_s)
        self.kv_bytes_in = 0
        self.kv_bytes_out = 0
        self.is_lost = False
        self.has_changed = True  # since the last heartbeat
        self._runner = runner
        self._cost = cost
        self._shares = shares_prefixes
        self._reserves_at_once = reserves_at_once
        self._timetable = timetable
        self._machine = machine
        self._clients: dict[int, Client] = {}  # by number of the sequence
        self._commands: list[Command] = []
        self._is_turn_due = False
        self._busy_s = 0.0  # in steps that have ended
        self._step: StepResult | None = None
        self._began_s = 0.0  # when it did
        self._before = (0, 0, 0)  # sequences, those that wait, free blocks: before the step
        self._run: _Run | None = None
        self._gaps: list[float] = []  # how long each step took, of those that somebody still asks for
        self._first_gap = 0  # number of the step of _gaps[0]
        self._ended_s = 0.0  # when the latest step ended, or the first in the streak joined
        self._looks_s = inf  # when it will look at deadlines
        self._in_streak: dict[Client, None] = {}  # those with a token from every step since they joined

    @property
    def busy_s(self) -> float:
        """Time in steps; of one that runs, what has passed."""
        if self._step is not None:
            return self._busy_s + self._timetable.time_s - self._began_s
        if self._run is not None:
            return self._busy_s + self._timetable.time_s - self._run.timed_s
        return self._busy_s

    def post(self, command: Command) -> None:
        """Obey ``command`` as soon as no step runs; a lost worker obeys nothing."""
        if self.is_lost:
            return
        if self._run is not None:
            self._cut(self._run)
        if self._step is None and self._run is None:
            command()
            self._turn_soon()
        else:
            self._commands.append(command)

    def post_reservation(self, command: Command, *, num_tokens: int) -> None:
        """As ``post``, of a command that takes room for ``num_tokens`` and does nothing else.

        Steady steps go on beside it, if there is room for both: what they take, and when, stays the same.
        """
        run = self._run
        if self._reserves_at_once and not self.is_lost:
            command()
            return
        if run is None or self.is_lost or not self._has_room_beside(run, num_tokens):
            self.post(command)
            return
        now_s = self._timetable.time_s
        ended = run.steps_until(now_s)
        if ended + 1 >= run.num_steps:
            self.post(command)
        elif ended and run.at_s(ended) == now_s:
            command()
        else:
            obey = partial(self._obey_beside, run, command, num_tokens)
            self._timetable.at(run.at_s(ended + 1), obey)

    def _obey_beside(self, run: _Run, command: Command, num_tokens: int) -> None:
        if self._run is run and not self.is_lost and self._has_room_beside(run, num_tokens):
            command()
        else:
            self.post(command)

    def _has_room_beside(self, run: _Run, num_tokens: int) -> bool:
        block_tokens = self.info.layout.block_tokens
        taken = run.num_decoding * ((run.num_steps - run.num_timed) // block_tokens + 1)
        if run.num_timed > run.num_booked:
            taken += self.engine.blocks_ahead(run.num_timed - run.num_booked)
        return not self._shares and self.engine.num_free_blocks - taken > num_tokens // block_tokens + 1

    def watch(self, sequence: SequenceState, client: Client) -> None:
        """Tell ``client`` what becomes of ``sequence``."""
        self._clients[sequence.number] = client

    def forget(self, sequence: SequenceState) -> None:
        """Tell nobody any more."""
        client = self._clients.pop(sequence.number, None)
        if client is not None and client in self._in_streak:
            del self._in_streak[client]
            client.times.leave(self._gaps, self._first_gap)

    def decodes(self, client: Client) -> None:
        """Count the tokens of ``client`` from the next step on: its sequence is one of those that decode."""
        if not self._in_streak:
            self._ended_s = self._timetable.time_s
        client.times.join(self._timetable.time_s, self._first_gap + len(self._gaps))
        self._in_streak[client] = None

    def load(self) -> WorkerLoad:
        """Return what a heartbeat says now."""
        engine, run = self.engine, self._run
        num_taken = 0
        if self._step is not None:
            return self._say(*self._before)
        if run is not None:
            ended = run.steps_until(self._timetable.time_s)
            if self._shares or ended == run.num_steps:
                self._settle(run)
            elif ended > run.num_booked:
                num_taken = engine.blocks_ahead(ended - run.num_booked)
        self.has_changed = self._run is not None
        return self._say(engine.num_sequences, engine.num_waiting, engine.num_free_blocks - num_taken)

    def _say(self, num_sequences: int, num_waiting: int, num_free_blocks: int) -> WorkerLoad:
        return WorkerLoad(
            running=num_sequences - num_waiting, queued=num_waiting, free_blocks=num_free_blocks
        )

    def lose(self) -> None:
        """Die: nothing it does counts any more."""
        if self._run is not None:
            self._settle(self._run)
        self._busy_s = self.busy_s
        self.is_lost = True
        for client in self._in_streak:
            client.times.leave(self._gaps, self._first_gap)
        self._in_streak.clear()
        self._clients.clear()
        self._commands.clear()
        self._step = self._run = None

    # One turn of the engine's thread.

    def _turn_soon(self) -> None:
        self.has_changed = True
        if not self._is_turn_due:
            self._is_turn_due = True
            self._timetable.last_now(self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        if self.is_lost or self._step is not None or self._run is not None:
            return
        engine, now_s = self.engine, self._timetable.time_s
        if now_s < engine.next_deadline_s:
            if not engine.has_work:
                self._wait_for_deadline()
                return
            num_steps = 0 if self._machine is not None else engine.steady_steps()
            if num_steps:
                self._begin_run(num_steps, now_s)
                return
        # A heartbeat says this until the step has ended.
        self._before = (engine.num_sequences, engine.num_waiting, engine.num_free_blocks)
        result = engine.step()
        if not result.num_items:
            self._tell_failures(result)
            self._wait_for_deadline()
            return
        _check_time(self._runner.step_s, self.info)
        self._step, self._began_s = result, now_s
        if self._machine is not None:
            end_s = self._machine.begin(
                self._runner.step_s, self._end_step, has_prompt=bool(self._runner.prompts)
            )
        else:
            end_s = now_s + self._runner.step_s
            self._timetable.at(end_s, self._end_step)
        for prompt in self._runner.prompts:
            client = self._clients.get(_number(prompt))
            if client is not None:
                client.computes(prompt, start_s=now_s, end_s=end_s)

    def _end_step(self) -> None:
        result, self._step = self._step, None
        if result is None:  # lost meanwhile
            return
        prompts = self._runner.prompts
        now_s = self._timetable.time_s
        self._busy_s += now_s - self._began_s
        self._gaps.append(now_s - self._ended_s if self._in_streak else self._runner.step_s)
        self._ended_s = now_s
        self._note_misses(result)
        for prompt in prompts:
            client = self._clients.get(_number(prompt))
            if client is not None:
                client.computed(prompt)
        for sequence, output in result.outputs:
            client = self._clients.get(sequence.number)
            if client is None:
                continue
            if output.finish is not None:
                self._end(sequence, client, output)
            else:
                self._give(sequence, client, output)
        self._tell_failures(result)
        self._obey()

    def _give(self, sequence: SequenceState, client: Client, output: TokenOutput) -> None:
        if client in self._in_streak:
            return
        client.times.add(self._timetable.time_s)
        if not sequence.has_destination:
            self.decodes(client)
        client.gave(output)

    def _end(self, sequence: SequenceState, client: Client, output: TokenOutput | None) -> None:
        """Close the times of an answer whose last token came with the step that just ended."""
        is_joined = client.times.is_joined
        self.forget(sequence)
        if not is_joined:
            client.times.add(self._timetable.time_s)
            if output is not None:
                client.gave(output)
        client.ended()

    def _note_misses(self, result: StepResult) -> None:
        """Let those leave the streak that decode and got no token from the step that just ended."""
        if not self._in_streak:
            return
        served = {self._clients.get(sequence.number) for sequence, _ in result.outputs}
        for client in [client for client in self._in_streak if client not in served]:
            del self._in_streak[client]
            client.times.leave(self._gaps[:-1], self._first_gap)

    def _tell_failures(self, result: StepResult) -> None:
        for sequence, error in result.failed:
            client = self._clients.get(sequence.number)
            if client is not None:
                self.forget(sequence)
                client.failed(error)

    def _wait_for_deadline(self) -> None:
        """An engine that has nothing to run still looks at deadlines."""
        deadline_s = self.engine.next_deadline_s
        if deadline_s < self._looks_s and self.engine.num_sequences and self._timetable.time_s < deadline_s:
            self._looks_s = deadline_s
            self._timetable.at(deadline_s, self._look)

    def _look(self) -> None:
        self._looks_s = inf
        self._turn()

    def _obey(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            command()
        if len(self._gaps) > 4096:
            self._trim()
        self._turn_soon()

    def _trim(self) -> None:
        """Forget the steps that nobody asks for any more."""
        last = self._first_gap + len(self._gaps)
        first = min((client.times.joined_at for client in self._in_streak), default=last)
        del self._gaps[: first - self._first_gap]
        self._first_gap = first

    # Steady steps.

    def _begin_run(self, num_steps: int, now_s: float) -> None:
        decoding = self.engine.decoding
        num_decoding = len(decoding)
        if len(self._in_streak) != num_decoding:
            for sequence in decoding:
                client = self._clients.get(sequence.number)
                if client is not None and client not in self._in_streak:
                    self.decodes(client)
        context_tokens = sum([len(sequence.token_ids) for sequence in decoding])
        base_s, per_token_s, up_to_tokens = self._cost.decode_line(num_decoding, context_tokens)
        room = up_to_tokens - context_tokens
        if room < num_steps * num_decoding:
            num_steps = max(1, int(room // num_decoding))
        first_s = base_s + per_token_s * context_tokens
        _check_time(first_s, self.info)
        run = _Run(now_s, first_s, per_token_s * num_decoding, num_steps, num_decoding)
        deadline_s = self.engine.next_deadline_s
        if run.end_s > deadline_s:
            run.end_after(max(1, min(num_steps, run.steps_until(deadline_s) + 1)))
        self._run = run
        self._timetable.at(run.end_s, partial(self._end_run, run))

    def _settle(self, run: _Run) -> None:
        """Book the steps of the run that have ended by now."""
        self._time(run)
        is_over = run.num_timed == run.num_steps
        if is_over:
            self._run = None
        num_new, run.num_booked = run.num_timed - run.num_booked, run.num_timed
        if num_new:
            for sequence in self.engine.decode_ahead(num_new, TOKEN):
                client = self._clients.get(sequence.number)
                if client is not None:
                    self._end(sequence, client, None)
        if is_over:
            self._obey()

    def _time(self, run: _Run) -> None:
        """Write down the times of the steps that have ended by now; the engine hears of them later."""
        first, done = run.num_timed, run.steps_until(self._timetable.time_s)
        if done == first:
            return
        began_s, ended_s = run.timed_s, run.at_s(done)
        gaps = run.gaps(first, done)
        gaps[0] += began_s - self._ended_s
        self._gaps += gaps
        self._ended_s = ended_s
        self._busy_s += ended_s - began_s
        run.num_timed, run.timed_s = done, ended_s

    def _cut(self, run: _Run) -> None:
        """Let the run end with the step that runs now."""
        self._time(run)
        done = run.num_timed
        if done + 1 < run.num_steps:
            is_between = done and run.timed_s == self._timetable.time_s  # two steps
            run.end_after(done if is_between else done + 1)
            if not is_between:
                self._timetable.at(run.end_s, partial(self._end_run, run))
        if done == run.num_steps:
            self._settle(run)

    def _end_run(self, run: _Run) -> None:
        if self._run is run and self._timetable.time_s >= run.end_s:
            self._settle(run)


class _Run:
    """Steady steps: the first takes ``first_s``, each next one ``growth_s`` longer.

    Attributes:
        num_timed: The first steps, whose times are written down.
        timed_s: When the last of them ended.
        num_booked: Those of them that the engine knows of.
    """

    __slots__ = (
        "_first_s",
        "_growth_s",
        "_start_s",
        "end_s",
        "num_booked",
        "num_decoding",
        "num_steps",
        "num_timed",
        "timed_s",
    )

    def __init__(
        self, start_s: float, first_s: float, growth_s: float, num_steps: int, num_decoding: int
    ) -> None:
        self.num_decoding = num_decoding
        self.num_steps = num_steps
        self.num_timed = 0
        self.timed_s = start_s
        self.num_booked = 0
        self._start_s = start_s
        self._first_s = first_s
        self._growth_s = growth_s
        self.end_s = self.at_s(num_steps)

    def end_after(self, num_steps: int) -> None:
        """Let so many steps be all."""
        self.num_steps = num_steps
        self.end_s = self.at_s(num_steps)

    def at_s(self, num_steps: int) -> float:
        """Return when so many steps have ended."""
        return self._start_s + num_steps * (self._first_s + 0.5 * self._growth_s * (num_steps - 1))

    def steps_until(self, now_s: float) -> int:
        """Return how many steps have ended by ``now_s``."""
        if now_s >= self.end_s:
            return self.num_steps
        after_s = now_s - self._start_s
        if self._growth_s == 0.0:
            guess = int(after_s / self._first_s)
        else:  # solve growth/2 n^2 + (first - growth/2) n = after
            half = 0.5 * self._growth_s
            slope = self._first_s - half
            guess = int((sqrt(slope * slope + 4.0 * half * after_s) - slope) / (2.0 * half))
        guess = min(guess, self.num_steps)
        while self.at_s(guess) > now_s:
            guess -= 1
        while guess < self.num_steps and self.at_s(guess + 1) <= now_s:
            guess += 1
        return guess

    def gaps(self, first: int, done: int) -> list[float]:
        """Return how long each of the steps ``[first, done)`` takes."""
        first_s, growth_s = self._first_s, self._growth_s
        return [first_s + growth_s * step for step in range(first, done)]


def _check_time(step_s: float, info: WorkerInfo) -> None:
    """Refuse a profile by which time would stand still, or never end.

    Raises:
        ConfigError: A step takes none, or more than a day.
    """
    if not 0.0 < step_s <= LONGEST_S:
        raise ConfigError("profile", f"of {info.worker_id} says that a step takes {step_s:g} s")


def _number(prompt: Prompt) -> int:
    sequence = prompt.sequence
    assert isinstance(sequence, SequenceState), "an engine's own sequences"
    return sequence.number
