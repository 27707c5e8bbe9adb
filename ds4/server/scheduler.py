"""Continuous batching: what each engine step computes, and where its results go.

    while not scheduler.stopped:
        plan = scheduler.plan()            # who decides     (here)
        out = engine.step(plan.rows)       # who computes    (ds4.engine)
        scheduler.commit(plan, out)        # who remembers   (ds4.server.slots, ds4.server.generation)

A step holds one decode row per running generation, then prefill chunks up to one budget (`ds4.server.budget`): at
most `prefill_quantum` tokens when nothing decodes, `mixed_prefill_quantum` when something does, so that a long prompt
never holds a stream up by more than one small chunk. Prefills take turns (round robin); what the first one in turn
leaves of the budget goes to the next. A stream that has drawn one token only waits for short prompts that came with it:
many that begin together are done sooner when all prompts are evaluated first and all streams then go on side by side.
Chunks end on absolute multiples of the budget, whatever was reused before them, so that the same prompt is evaluated on
the same grid. A prompt that becomes complete draws its first token in the same step. Of prompts that begin alike and
arrive together one is evaluated; the others wait a step and fork what they share, if that is worth a step. A checkpoint
is loaded beside the running steps; its session joins them when it is complete.

An engine that is idle when a prompt comes waits a little for others that are on their way (`ds4.server.arrivals`).

A generation that decodes alone has the engine guess ahead, where it can and as long as that pays.

Admission is first in, first out. Two threads meet here: any thread may `submit`, `cancel` and `shutdown`, which only
put a message into the inbox; everything else belongs to the engine thread. Events leave through `deliver`. With
`names_elsewhere` whoever gets them calls `name` for each job before it passes on its end.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds4._core import Bell, common_prefix_tokens, tokens_below
from ds4.engine.drafting import DraftPolicy
from ds4.errors import ConfigError, ContextLengthError, Ds4Error, RequestError, ShuttingDown
from ds4.server.arrivals import Gathering
from ds4.server.budget import GRAIN, Budget, Limits
from ds4.server.generation import Generation, Job, Restoring
from ds4.server.naming import Names, Naming
from ds4.server.observer import Observer, SlotState, StepReport, slot_state
from ds4.server.plan import Plan, Work
from ds4.server.process import usable_cores
from ds4.server.reuse import NEAR, NOTHING, Fork, LiveText, Lookup, Query, Reuse, materialise, probe, settle
from ds4.server.slots import Slot, Slots, describe, log_route
from ds4.server.snapshots import Snapshots
from ds4.server.types import Event, Failed, Finish, GenerationRequest, Started

if TYPE_CHECKING:
    from ds4.engine.types import EngineLike, RowResult
    from ds4.server.checkpoints import Checkpoints
    from ds4.server.keys import Markers

log = logging.getLogger("ds4.scheduler")

Deliver = Callable[[list[tuple[Job, list[Event]]]], None]
"""Takes all events of a step at once, on the engine thread; must not block."""


_INT32 = np.dtype(np.int32)
NAMED_HERE = 16384
"""Bytes of a conversation that the engine thread renders itself: 60 us."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`slots` resident sessions; the two prefill budgets in tokens per step, the most that either may be.

    `draft_timing`: a generation's end tells what guessing took. `step_seconds` bounds how long a prefill step may take
    by measured speed: a cancellation, a new request and a shutdown wait for the running step. The budget is then a
    smaller multiple of `mixed_prefill_quantum`. Where much of a step is its fixed cost it may take longer.
    """

    slots: int = 1
    prefill_quantum: int = 2048
    mixed_prefill_quantum: int = 128
    step_seconds: float = 0.1
    draft_timing: bool = False

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_quantum", "mixed_prefill_quantum"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.step_seconds <= 0:
            raise ConfigError(f"step_seconds must be positive, got {self.step_seconds}")


@dataclass(frozen=True, slots=True)
class _Cancel:
    job: Job


@dataclass(frozen=True, slots=True)
class _Restored:
    generation: Generation
    error: Exception | None


@dataclass(frozen=True, slots=True)
class _Named:
    naming: Naming
    names: Names


@dataclass(frozen=True, slots=True)
class _Shutdown:
    grace: float


_Message = Job | _Cancel | _Restored | _Named | _Shutdown


class Scheduler:
    """Jobs in, steps out. See the module's text for the policy and the threads."""

    def __init__(
        self,
        engine: EngineLike,
        config: SchedulerConfig,
        deliver: Deliver,
        *,
        checkpoints: Checkpoints | None = None,
        observer: Observer | None = None,
        markers: Markers | None = None,
        log_route: Callable[[str], None] = log_route,
        names_elsewhere: bool = False,
        expected: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log_route` takes each decision where it is made, in one line; another thread may better write it down.
        `expected`: are requests on their way that an idle engine should wait for? See `ds4.server.arrivals`."""
        self.slots = Slots(engine, config.slots, checkpoints.store if checkpoints else None)
        self._snapshots = Snapshots(engine, self.slots, markers, clock)
        self.stopped = False
        self._ctx = self.slots[0].session.ctx
        self._engine = engine
        self._config = config
        self._deliver = deliver
        self._checkpoints = checkpoints
        self._observer = observer
        self._log_route = log_route
        self._clock = clock
        self._names_elsewhere = names_elsewhere
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._bell = Bell()
        self._cores = usable_cores()
        self._accepting = True
        self._drafting = DraftPolicy(engine.most_drafts)
        self._queue: deque[Job] = deque()
        self._outbox: list[tuple[Job, list[Event]]] = []
        self._admitted: list[Generation] = []
        """Since the last step."""
        self._line: list[Generation] = []
        """Prefills in the order of their turns."""
        limits = Limits(config.prefill_quantum, config.mixed_prefill_quantum, config.step_seconds)
        self._budget = Budget(limits, first=engine.config.prefill_chunk)
        self._gathering = Gathering(expected)
        self._deadline: float | None = None

    # ---- any thread

    def submit(self, request: GenerationRequest, sink: object = None) -> Job:
        """Queues a request.

        Raises ShuttingDown once `shutdown` was called; RequestError and ContextLengthError for a prompt that no step
        can take, because a bad row would fail its whole step.
        """
        if not self._accepting:
            raise ShuttingDown("server shutting down")
        job = Job(request, self._prompt(request), self._clock(), sink)
        self._post(job)
        return job

    def stay_awake(self) -> None:
        """A request has come and is being read: an idle engine thread stays awake for it, where that takes no core
        from the reader."""
        if self._cores > 1:
            self._bell.soon()

    def _post(self, message: _Message) -> None:
        self._inbox.put(message)
        self._bell.ring()

    def _prompt(self, request: GenerationRequest) -> npt.NDArray[np.int32]:
        """The prompt as the engine takes it, [n] int32, each id in the vocabulary and n within the context."""
        count, vocab = len(request.prompt_tokens), self._engine.info.vocab_size
        if count == 0:
            raise RequestError("the prompt is empty", param="prompt")
        if count > self._ctx:
            raise ContextLengthError(count, self._ctx)
        tokens = request.prompt_tokens
        if isinstance(tokens, np.ndarray) and tokens.dtype is _INT32 and tokens_below(tokens.data, vocab):
            return tokens
        try:
            ids = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens, np.int64)
        except OverflowError:
            raise RequestError(f"a token is outside the vocabulary of {vocab}", param="prompt") from None
        for extreme in (int(ids.min()), int(ids.max())):
            if not 0 <= extreme < vocab:
                raise RequestError(f"token {extreme} is outside the vocabulary of {vocab}", param="prompt")
        return ids.astype(np.int32, copy=False)

    def cancel(self, job: Job) -> None:
        """Ends a job wherever it is, at the latest after the running step. Harmless when it is over."""
        job.cancelled = True
        self._post(_Cancel(job))

    def name(self, job: Job) -> None:
        """Works out what texts the session of an ended job stands for. Its client must not learn of the end before."""
        naming, job.naming = job.naming, None
        if naming is None:
            return
        try:
            names = naming.names()
        except Exception as error:
            log.error("%s: the live text is not known: %s", job.request.id, error, exc_info=error)
            names = Names()
        self._post(_Named(naming, names))

    def shutdown(self, grace: float) -> None:
        """Refuses new and queued requests; running ones may finish within `grace` seconds. May be called again."""
        self._accepting = False
        self._post(_Shutdown(grace))

    @property
    def n_queued(self) -> int:
        return len(self._queue) + self._inbox.qsize()

    @property
    def restoring(self) -> bool:
        """A checkpoint is being loaded: more will come without a new request."""
        return any(slot.loading for slot in self.slots)

    def slot_states(self) -> list[SlotState]:
        """What the slots do, for people: read beside the running step, so it may be one token old."""
        now = self._clock()
        return [slot_state(slot, now) for slot in self.slots]

    # ---- engine thread

    def plan(self) -> Plan:
        """Takes in what arrived, admits what fits and lays out the next step; no rows when there is nothing to do."""
        now = self._clock()
        self._take_messages()
        self._admit(now)
        self._drain(now)
        plan = Plan()
        streams = [g for slot in self.slots if (g := slot.generation) is not None and g.next_token is not None]
        plan.hold = self._hold(now)
        if plan.hold:
            self._flush()
            return plan
        together = self._together(streams, now)
        if not together:
            self._add_decode(plan, streams)
        self._add_prefill(plan)
        if together and not plan.rows:
            self._add_decode(plan, streams)
        if plan.alone and (drafts := self._drafting.wanted()):
            plan.rows[0] = plan.work[0].generation.decode_row(drafts)
        if not self._soon_more(plan):
            self._flush()
        if self._observer is not None and not plan.rows:
            self._tell(self._observer.on_idle)
        self._admitted.clear()
        plan.started = self._clock()
        return plan

    def commit(self, plan: Plan, results: Sequence[RowResult]) -> None:
        """Gives each row's result to its generation and delivers all events of the step."""
        now = self._clock()
        ttft: list[float] = []
        itl: list[float] = []
        drafted = accepted = 0
        draft_seconds = 0.0
        for work, result in zip(plan.work, results, strict=True):
            generation = work.generation
            job = generation.job
            if job.cancelled:
                continue
            events: list[Event] = []
            before = generation.last_token_time
            try:
                if work.end is not None:
                    over = generation.prefilled(work.end, result, now, events)
                    if work.end == generation.prompt_tokens:
                        if generation.completion_tokens:
                            ttft.append(now - (job.request.created or job.submitted))
                        self._evaluated(generation)
                    self._reached(generation)
                elif result.ahead is None:
                    over = generation.accept(result, now, events)
                    self._reached(generation)
                    itl.append(now - before)
                else:
                    drafted += result.ahead.drafted
                    draft_seconds = result.ahead.seconds
                    if self._config.draft_timing:
                        generation.draft_seconds += draft_seconds
                    over, count = generation.accept_all(result, now, events, partial(self._reached, generation))
                    accepted += count - 1
                    itl += [now - before] + [0.0] * (count - 1)
            except Exception as error:
                self._end(generation, self._failure(error), events)
                continue
            if over:
                self._release(generation, events)
            if events:
                self._outbox.append((job, events))
        self._flush()
        decode_rows = plan.decode_rows
        self._budget.observe(plan.prefill_tokens, decode_rows, now - plan.started)
        if plan.alone:
            self._drafting.observe(drafted, accepted, now - plan.started)
        if self._observer is not None:
            report = StepReport(
                seconds=now - plan.started,
                decode_rows=decode_rows,
                prefill_rows=len(plan.rows) - decode_rows,
                prefill_tokens=plan.prefill_tokens,
                queued=len(self._queue),
                busy=self.slots.n_busy,
                ttft=ttft,
                itl=itl,
                drafted=drafted,
                accepted=accepted,
                draft_seconds=draft_seconds,
            )
            self._tell(self._observer.on_step, report)

    def _evaluated(self, generation: Generation) -> None:
        """The session holds just the prompt."""
        slot, query = generation.slot, generation.job.query
        names: tuple[LiveText, ...] = ()
        if query.key:
            slot.asked = LiveText(query.key, generation.prompt_tokens, last=int(query.prompt[-1]))
            names = (slot.asked,)
        self._snapshots.take(slot, names, turn=False)

    def _reached(self, generation: Generation) -> None:
        """A chunk or a token was evaluated."""
        if generation.frontiers:
            generation.passed()
        if generation.places:
            self._snapshots.reached(generation)
        if self._checkpoints is not None:
            self._checkpoints.reached(generation)

    def fail(self, plan: Plan, error: Exception) -> None:
        """The step failed: each of its jobs is told so, its sessions are empty, the server goes on."""
        log.error("step of %d rows failed: %s", len(plan.rows), error, exc_info=not isinstance(error, Ds4Error))
        for work in plan.work:
            generation = work.generation
            entry = generation.reuse.entry
            if entry is not None and generation.prefilling and self._checkpoints is not None:
                self._checkpoints.store.set_aside(entry, "prefill-failed")
            _clear(generation.slot)
            self._end(generation, self._failure(error), [])
        self._flush()

    def abort(self, error: Exception) -> None:
        """Something of ours is broken: ends every running generation, so that it cannot fail again for ever."""
        log.error("scheduler failed: %s", error, exc_info=error)
        for slot in self.slots:
            if slot.generation is not None:
                if slot.generation.restoring is None:
                    _clear(slot)
                self._end_running(slot.generation, self._failure(error))
        self._flush()

    def close(self) -> None:
        """After the last step: stores what is resident where a store is, frees the sessions."""
        if self._checkpoints is not None:
            self._checkpoints.end(self.slots)
            self._checkpoints.store.close()
        self.slots.close()

    def wait(self, seconds: float | None = None) -> None:
        """Blocks until a message has come, or for so many seconds, and takes it in."""
        if seconds is None:
            while self._inbox.empty():
                self._bell.wait()
        else:
            with suppress(Empty):
                self._receive(self._inbox.get(timeout=seconds))
        self._take_messages()

    # ---- messages

    def _take_messages(self) -> None:
        inbox = self._inbox
        while not inbox.empty():
            self._receive(inbox.get_nowait())

    def _receive(self, message: _Message) -> None:
        if isinstance(message, Job):
            self._queue.append(message)
        elif isinstance(message, _Cancel):
            self._cancel(message.job)
        elif isinstance(message, _Restored):
            self._restored(message.generation, message.error)
        elif isinstance(message, _Named):
            self._named(message.naming, message.names)
        else:
            deadline = self._clock() + message.grace
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _cancel(self, job: Job) -> None:
        for slot in self.slots:
            if slot.generation is not None and slot.generation.job is job:
                self._end_running(slot.generation, slot.generation.cancel(self._clock()))
                return
        if job in self._queue:
            self._queue.remove(job)
            self._end_queued(job, Finish("cancelled", len(job.prompt), 0, 0, 0))

    def _drain(self, now: float) -> None:
        """Shutdown: the queue is refused at once, the running ones when their time is over."""
        if self._deadline is None:
            return
        while self._queue:
            self._end_queued(self._queue.popleft(), Failed("server shutting down", 503))
        if now >= self._deadline:
            for slot in self.slots:
                if slot.generation is not None:
                    self._end_running(slot.generation, Failed("shutdown requested", 503))
        unnamed = any(slot.naming is not None for slot in self.slots)
        self.stopped = self.slots.n_busy == 0 and not unnamed

    # ---- admission

    def _admit(self, now: float) -> None:
        while self._queue and self._deadline is None:
            job = self._queue[0]
            try:
                route = self.slots.route(job.query, now)
                if route is None:
                    return
                self._log_route(f"{job.request.id}: {describe(route, len(job.prompt), now)}")
                generation = Generation(job, route.slot, route.reuse, self._engine, now)
            except Exception as error:
                self._end_queued(job, self._failure(error))
            else:
                self._occupy(generation)
            self._queue.popleft()

    def _occupy(self, generation: Generation) -> None:
        """Gives the slot to the generation and brings its session to what the route promised."""
        slot, reuse = generation.slot, generation.reuse
        slot.generation = generation
        self._admitted.append(generation)
        if self._checkpoints is not None:
            self._checkpoints.leaving(slot, reuse)
        self._carry_out(generation, reuse)

    def _carry_out(self, generation: Generation, reuse: Reuse) -> None:
        slot = generation.slot
        if reuse.entry is None or self._checkpoints is None:
            self._settle(generation, materialise(slot, generation.job.query, reuse))
            return
        generation.reuse = reuse
        slot.past.drop()
        job, restoring = generation.job, Restoring()
        generation.restoring = restoring
        self._checkpoints.store.restore(
            reuse.entry,
            slot.session,
            job.query.key,
            lambda error: self._post(_Restored(generation, error)),
            lambda: job.cancelled or restoring.over is not None,
        )

    def _restored(self, generation: Generation, error: Exception | None) -> None:
        """The checkpoint is loaded, or the session is empty."""
        restoring, generation.restoring = generation.restoring, None
        if restoring is not None and restoring.over is not None:
            self._end(generation, restoring.over, [])
            return
        if error is None:
            self._settle(generation, materialise(generation.slot, generation.job.query, generation.reuse))
        else:
            # The store does not choose this one again: the next best, on disk or not.
            self._carry_out(generation, self.slots.probe(generation.slot, generation.job.query))

    def _settle(self, generation: Generation, reuse: Reuse) -> None:
        """What was kept is final; where it cannot be gone on with, the best of the rest is."""
        slot, query = generation.slot, generation.job.query
        try:
            settled = settle(slot, query, reuse, self._engine.tokenizer)
            # What was a checkpoint is not looked for a second time: it cannot be gone on with.
            if settled is None or reuse is NOTHING:
                if query.continues is not None and query.continues.required:
                    self._end(generation, self._failure(query.continues.gone), [])
                    return
                slot.forget()  # or it would be chosen again
                reuse = materialise(slot, query, probe(slot, Lookup(query, self.slots)))
                settled = reuse, query
        except Exception as error:
            _clear(slot)
            self._end(generation, self._failure(error), [])
            return
        names = _names(slot, settled[0], query)
        slot.forget()
        generation.settle(*settled)
        self._snapshots.take(slot, names)
        self._line.append(generation)

    def _begin(self, generation: Generation, plan: Plan, waiting: int) -> bool:
        """Just before the first chunk: a neighbour may have evaluated more of the same prompt since the admission.

        False when it is about to do so in this very step, and the `waiting` jobs that have not begun do better to wait
        for that. It waits for the same once: not every session can be forked where prompts part.
        """
        job, slot = generation.job, generation.slot
        # What was found at the admission stands until something is evaluated.
        known = generation in self._admitted
        reuse = NOTHING if known else probe(slot, Lookup(job.query, self.slots))
        held = generation.reuse.tokens if known else reuse.tokens
        for shared in _shared(plan, job):
            new = shared - held
            if new > Fork.margin and shared > generation.waited and self._budget.worth_a_step(new * waiting):
                generation.waited = shared
                return False
        if reuse.source is not None:
            reuse = materialise(slot, job.query, reuse)
            settled = settle(slot, job.query, reuse, self._engine.tokenizer)
            if settled is None:
                slot.clear()
                settled = NOTHING, job.query
            self._snapshots.take(slot, _names(slot, settled[0], job.query))
            generation.settle(*settled)
        reuse = generation.reuse
        self._outbox.append((job, [generation.start(reuse)]))
        if self._checkpoints is not None:
            self._checkpoints.begin(generation)
        self._snapshots.begin(generation)
        if self._observer is not None:
            self._tell(self._observer.on_start, job, reuse, generation.assigned - job.submitted)
        return True

    @staticmethod
    def _add_decode(plan: Plan, streams: Sequence[Generation]) -> None:
        plan.rows += [generation.decode_row() for generation in streams]
        plan.work += map(Work, streams)

    def _hold(self, now: float) -> float:
        """Seconds that the prompts should wait for others on their way: 0 where something has begun already, a step is
        full, or nobody else would get a slot."""
        new = [g for g in self._line if g.slot.generation is g and not g.begun]
        busy = self.slots.n_busy if new else 0
        if (
            not new
            or len(new) < busy
            or busy == len(self.slots)
            or self._deadline is not None
            or sum(g.prompt_tokens - g.position for g in new) >= self._budget.alone()
        ):
            self._gathering.over()
            return 0.0
        return self._gathering.hold(now, self._budget.gather())

    def _together(self, streams: Sequence[Generation], now: float) -> bool:
        """Do the streams wait for the prompts? Where none has more than its first token, none has waited for long, and
        the end of the prompts is near."""
        waiting = [g for g in self._line if g.slot.generation is g]
        if not streams or not waiting or any(stream.completion_tokens > 1 for stream in streams):
            return False
        known = streams[0].job.prompt
        left = 0
        for generation in waiting:
            prompt = generation.job.prompt
            shared = 0 if generation.begun else common_prefix_tokens(prompt.data, known.data)
            left += len(prompt) - max(generation.position, shared)
        return self._budget.together(left, now - min(stream.last_token_time for stream in streams))

    # ---- prefill

    def _add_prefill(self, plan: Plan) -> None:
        """Chunks of the waiting prompts, in turn, up to one budget; who comes first goes to the end of the line."""
        waiting = [g for g in self._line if g.slot.generation is g and g.prefilling]
        if not waiting:
            self._line = waiting
            return
        new = sum(not generation.begun for generation in waiting)
        budget = left = self._budget.beside(len(plan.rows)) if plan.rows else self._budget.alone()
        grain = min(GRAIN, self._config.mixed_prefill_quantum, budget)
        first: Generation | None = None
        for generation in waiting:
            try:
                if not generation.begun:
                    if not self._begin(generation, plan, new):
                        continue
                    new -= 1
            except Exception as error:
                self._end(generation, self._failure(error), [])
                continue
            position, total = generation.position, generation.prompt_tokens
            if first is None:
                end = min(total, (position // budget + 1) * budget)
            else:
                end = total if total - position <= left else (position + left) // grain * grain
            if end <= position:
                continue
            end = generation.chunk_end(end)
            first = first or generation
            plan.add(generation.prefill_row(end), Work(generation, end))
            plan.prefill_tokens += end - position
            left -= end - position
            if left <= 0:
                break
        if first is not None:
            waiting.remove(first)
            waiting.append(first)
        self._line = waiting

    # ---- ends

    def _release(self, generation: Generation, events: list[Event]) -> None:
        """Frees the slot of a generation whose terminal event is the last of `events`."""
        slot = generation.slot
        slot.generation = None
        slot.prompt_tokens = generation.prompt_tokens
        slot.tokens = slot.session.n_tokens
        slot.last_used = self._clock()
        terminal = events[-1]
        self._name(generation, terminal)
        if self._observer is not None and isinstance(terminal, (Finish, Failed)):
            self._tell(self._observer.on_end, generation.job, terminal)

    def _name(self, generation: Generation, terminal: Event) -> None:
        """By what texts the next turn can find what the session holds now. Nothing to fail a request for."""
        slot = generation.slot
        try:
            slot.bound = generation.bound(terminal) if isinstance(terminal, Finish) else None
            naming = generation.naming(terminal) if isinstance(terminal, (Finish, Failed)) else None
            if naming is not None and self._names_elsewhere and naming.size > NAMED_HERE:
                slot.text = slot.visible = None
                slot.naming = generation.job.naming = naming
            else:
                names = Names() if naming is None else naming.names()
                slot.text, slot.visible = names.text, names.visible
        except Exception as error:
            log.error("%s: the live text is not known: %s", generation.job.request.id, error, exc_info=error)
            slot.forget()

    def _named(self, naming: Naming, names: Names) -> None:
        """Of no use when another prompt has taken the session meanwhile."""
        for slot in self.slots:
            if slot.naming is naming:
                slot.text, slot.visible, slot.naming = names.text, names.visible, None

    def _end(self, generation: Generation, terminal: Finish | Failed, events: list[Event]) -> None:
        events.append(terminal)
        self._release(generation, events)
        self._outbox.append((generation.job, events))

    def _end_running(self, generation: Generation, terminal: Finish | Failed) -> None:
        """As `_end`; a session that is being loaded becomes free when the loader lets go of it."""
        if generation.restoring is None:
            self._end(generation, terminal, [])
        elif generation.restoring.over is None:
            generation.restoring.over = terminal

    def _end_queued(self, job: Job, terminal: Finish | Failed) -> None:
        self._outbox.append((job, [terminal]))
        if self._observer is not None:
            self._tell(self._observer.on_end, job, terminal)

    def _failure(self, error: Exception) -> Failed:
        """Our own errors explain themselves; the text of any other is for the log only."""
        if isinstance(error, RequestError):
            return Failed(str(error), error.status, {} if error.param is None else {"param": error.param})
        if isinstance(error, Ds4Error):
            return Failed(str(error))
        log.error("unexpected %s", type(error).__name__, exc_info=error)
        return Failed("internal error")

    def _tell(self, observe: Callable[..., None], *what: object) -> None:
        """Metrics that break harm no job."""
        try:
            observe(*what)
        except Exception as error:
            log.error("observer failed: %s", error, exc_info=error)

    def _soon_more(self, plan: Plan) -> bool:
        """There is only to tell that generations begin, and the step brings what comes next of them before long: each
        wake-up of the event loop takes a core from it."""
        return 0 < plan.prefill_tokens <= NEAR and all(isinstance(events[-1], Started) for _, events in self._outbox)

    def _flush(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            try:
                self._deliver(batch)
            except Exception as error:
                log.error("events of %d jobs were not delivered: %s", len(batch), error)


def _clear(slot: Slot) -> None:
    """Empties a session whose state is in doubt. One that cannot even be emptied is not in the way of the others."""
    try:
        slot.clear()
    except Exception as error:
        log.error("slot %d cannot be cleared: %s", slot.index, error, exc_info=error)


def _names(slot: Slot, reuse: Reuse, query: Query) -> tuple[LiveText, ...]:
    """The texts that stand for just what the session keeps."""
    seen = slot.visible.text if slot.visible is not None else None
    names = [n for n in (reuse.name, slot.text, seen) if reuse.in_place and n is not None and n.tokens == reuse.tokens]
    if not names and not reuse.tail and reuse.text_bytes is not None:
        names = [LiveText(query.key[: reuse.text_bytes], reuse.tokens)]
    return tuple(dict.fromkeys(names))


def _shared(plan: Plan, job: Job) -> Iterator[int]:
    """How long a beginning of the job's prompt each prefill row of this step evaluates. In the next step the job can
    fork it, instead of evaluating it again in this one."""
    for work in plan.work:
        if work.end is None:
            continue
        query = work.generation.job.query
        if work.generation.reuse.text_bytes is not None and query.key and job.query.key.startswith(query.key):
            # It goes on with tokens of its own, which this prompt is going to share by their text.
            yield work.generation.prompt_tokens
        else:
            yield common_prefix_tokens(query.prompt[: work.end].data, job.prompt[:-1].data)
