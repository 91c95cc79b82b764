"""Takes in, updates and hands out what a server holds: all requests that are about its values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.errors import JaxfleetError
from jaxfleet.ir import Program, parse
from jaxfleet.ir.resources import with_values
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.messages import Kind, Message, Plain, Tensor
from jaxfleet.ps.server.desk import (
    Desk,
    Job,
    RefusedError,
    Request,
    names_of,
    refusal_of,
    tensors_bytes,
    text_of,
)
from jaxfleet.ps.server.links import Links, parts_message
from jaxfleet.ps.server.machine import Machine
from jaxfleet.ps.server.plan import BlockPlan, ServerPlan, read_plan
from jaxfleet.ps.server.progress import Progress, Sent
from jaxfleet.ps.server.storage import Aside, OwnCheckpoints, Restored, load_state, save_part

Arrays = Mapping[str, np.ndarray]

_MOST_WAITING = 512  # requests of a kind, of one trainer: each is looked at as others come
_PER_NAME = 512  # bytes that a name costs besides its array
_TOGETHER_BYTES = 1 << 20  # of gradients, of blocks that run as one job
_MOST_AHEAD = 1 << 16  # steps that another server may be ahead


@dataclass
class Pull:
    """A pull of which something is still to be answered.

    Attributes:
        request: the pull.
        left: the names that were not answered yet.
    """

    request: Request
    left: list[str]


@dataclass
class Holder:
    """What a server holds, and the requests that wait for it.

    Attributes:
        desk: where answers and work go.
        cache: where executables are kept.
        clock: tells the time in seconds.
        queued_bytes: the most bytes of gradients that wait.
        own: the server's own checkpoints.
        links: to the other servers.
        pulls: those that wait.
        between: requests that need a moment between two steps: saves and loads.
        saved: the step of the last own checkpoint.
        job: the job's name.
        job_program: the hash of its program.
        incarnation: tells this server from the one before it.
        on_load: is called when a checkpoint was loaded: what came before it is void.
    """

    desk: Desk
    cache: ExecutableCache
    clock: Callable[[], float]
    queued_bytes: int
    own: OwnCheckpoints | None
    links: Links = field(default_factory=Links)
    pulls: list[Pull] = field(default_factory=list)
    between: list[Request] = field(default_factory=list)
    saved: int | None = None
    job: str = ""
    job_program: str = ""
    incarnation: str = ""
    on_load: Callable[[], None] = lambda: None
    _text: str = ""
    _plan: ServerPlan | None = None
    _machine: Machine | None = None
    _progress: Progress | None = None
    _host: dict[str, np.ndarray] = field(default_factory=dict)
    _assigned: set[str] = field(default_factory=set)
    _extras: dict[str, np.ndarray] = field(default_factory=dict)
    _extras_step: int = 0
    _busy: bool = False  # a save or a load was handed out

    @property
    def defined(self) -> bool:
        """Whether there is a program."""
        return self._plan is not None

    @property
    def step(self) -> int:
        """The last step applied, -1 without a state."""
        return self._progress.applied if self._progress is not None else -1

    # --- the program -------------------------------------------------------------------------

    def restore(self, restored: Restored) -> None:
        """Takes up what an own checkpoint holds."""
        self._take(restored.program)
        machine, progress = self._parts()
        self._host.update(machine.assign(restored.arrays))
        progress.restart(restored.step)
        self.saved, self.job_program = restored.step, restored.job_program
        aside = restored.aside
        self._extras, self._extras_step = dict(aside.extras), aside.extras_step
        for step, parts in aside.parts.items():
            tensors = [Tensor(name, array) for name, array in parts.items()]
            self.links.keep(self._parts_message(step, tensors))

    def define(self, request: Request) -> None:
        """Takes the program; the same one again changes nothing."""
        text = text_of(request.message, "program")
        if self._plan is None:
            self._define(text, request.message.tensors)
        elif text != self._text and _parsed(text) != self._plan.program:
            what = f"trainer {request.trainer} defines another program than this server has"
            hint = "all trainers must run the same script, with the same strategy"
            raise RefusedError("refused", what, hint=hint)
        self.desk.answer(request.peer, request.message, Kind.OK)

    def _define(self, text: str, constants: Sequence[Tensor]) -> None:
        try:
            self._take(_with_constants(_parsed(text), constants))
        except RefusedError:
            raise
        except Exception as error:  # whatever is wrong with the program, the server lives on
            raise refusal_of("bad_message", error) from error
        self._text = text
        machine = self._parts()[0]
        self.desk.jobs.append(Job("compiling", machine.compile, lambda _: None))

    def _take(self, program: Program) -> None:
        plan = read_plan(program, self.cache)
        self._plan, self._machine = plan, Machine(plan)
        self._progress = Progress(plan)
        if plan.exchange is not None:
            self.links.others = plan.exchange.others

    def _parts(self) -> tuple[Machine, Progress]:
        if self._machine is None or self._progress is None:
            hint = "send define first"
            raise RefusedError("bad_message", "the server has no program", hint=hint)
        return self._machine, self._progress

    # --- state comes in ----------------------------------------------------------------------

    def assign(self, request: Request) -> None:
        """Takes the first state; where there is one, it stays."""
        self.check_assign(request.message)
        _, progress = self._parts()
        message = request.message

        def done(_: Any) -> None:
            self.desk.answer(request.peer, message, Kind.OK)

        if progress.applied >= 0:
            progress.duplicates += len(message.tensors)
            if message.step == progress.applied:
                self._keep_extras(message)
            done(None)
            return
        fresh = [tensor for tensor in message.tensors if tensor.name not in self._assigned]
        self._assigned.update(tensor.name for tensor in fresh)
        self._keep_extras(message)
        self._start_assign(fresh, message.step, done, replace=False)

    def _keep_extras(self, message: Message) -> None:
        """Keeps what the trainers' own state starts from, until all can have had it."""
        state = self._parts()[0].plan.state
        extras = [tensor for tensor in message.tensors if tensor.name not in state]
        if extras and message.step >= self._extras_step:
            self._extras.update((tensor.name, tensor.array.copy()) for tensor in extras)
            self._extras_step = message.step

    def replace(self, message: Message, answer: Callable[[], None]) -> None:
        """Takes a state that all trainers sent, in the place of what there was."""
        self._keep_extras(message)
        self._start_assign(message.tensors, message.step, lambda _: answer(), replace=True)

    def check_assign(self, message: Message) -> None:
        """Refuses values that the server cannot hold.

        Raises:
            RefusedError: a name, a dtype or a shape is wrong.
        """
        self._parts()
        plan = self._plan
        assert plan is not None
        held = sum(array.nbytes + _PER_NAME for array in self._extras.values())
        if held + tensors_bytes(message) > self.queued_bytes:
            raise RefusedError("bad_message", f"trainers' own state has {held} bytes already")
        for tensor in message.tensors:
            if tensor.name not in plan.state:
                if plan.server != 0:
                    what = f"server {plan.server} does not hold '{tensor.name}'"
                    raise RefusedError("bad_message", what)
                continue
            wanted, array = plan.types[tensor.name], tensor.array
            if array.dtype != wanted.dtype or array.shape != wanted.shape:
                found = f"{array.dtype}{list(array.shape)}"
                what = f"'{tensor.name}' is {found}, not {wanted.dtype}{list(wanted.shape)}"
                raise RefusedError("bad_message", what)

    def _start_assign(
        self,
        tensors: Sequence[Tensor],
        step: int,
        answer: Callable[[Any], None],
        *,
        replace: bool,
    ) -> None:
        machine, progress = self._parts()
        state = machine.plan.state
        own = {tensor.name: tensor.array for tensor in tensors if tensor.name in state}

        def go_on() -> None:
            progress.restart(step)
            answer(None)
            self.go_on()

        def then(views: Arrays) -> None:
            self._host.update(views)
            if (replace or progress.applied < 0) and not machine.missing():
                self._save_own(step, go_on)  # nobody sees a state that may be lost again
            else:
                answer(None)

        self.desk.jobs.append(Job("taking a state", lambda: machine.assign(own), then))

    # --- steps -------------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """Takes gradients.

        Raises:
            RefusedError: they are not of this program, or too many wait.
        """
        _, progress = self._parts()
        message = request.message
        if progress.applied < 0:
            what = f"gradients of step {message.step} came before any state"
            raise RefusedError("bad_message", what, hint="send assign first")
        misfit = progress.misfit(request.trainer, message.tensors)
        if misfit is None and message.step < 1:
            misfit = f"there is no step {message.step}; they start at 1"
        if misfit is not None:
            raise RefusedError("bad_message", misfit)
        bytes_ = tensors_bytes(message)
        if message.step > progress.step and progress.queued_bytes + bytes_ > self.queued_bytes:
            what = f"step {message.step} is {message.step - progress.step} steps ahead, and"
            what = f"{what} {progress.queued_bytes} bytes of later steps wait already"
            raise RefusedError("bad_message", what, hint="push as far as the pulls were answered")
        progress.push(message.step, request.trainer, message.tensors)
        self.go_on()

    def parts(self, message: Message) -> None:
        """Takes what another server sent for a step."""
        _, progress = self._parts()
        assert self._plan is not None
        exchange = self._plan.exchange
        for tensor in message.tensors:
            server = exchange.there.get(tensor.name) if exchange is not None else None
            wanted = self._plan.types.get(tensor.name)
            if f"server {server}" != message.sender or wanted is None:
                raise RefusedError("bad_message", f"'{tensor.name}' is no part of {message.sender}")
            if (tensor.array.dtype, tensor.array.shape) != (wanted.dtype, wanted.shape):
                raise RefusedError("bad_message", f"part '{tensor.name}' has another type")
        if progress.queued_bytes + tensors_bytes(message) > self.queued_bytes:
            raise RefusedError("bad_message", f"too much waits for later steps than {self.step}")
        if message.step > progress.step + _MOST_AHEAD:
            raise RefusedError("bad_message", f"step {message.step} is far from {self.step}")
        progress.take_parts(message.step, message.tensors)
        self.go_on()

    def go_on(self) -> None:
        """Answers what can be answered, and hands out what can run."""
        progress = self._progress
        if progress is None:
            return
        self._serve_pulls()
        self._serve_between()
        if not self._busy:
            for blocks in _together(progress.hand_out()):
                self._start(blocks, progress.step)

    def _start(self, blocks: Sequence[tuple[BlockPlan, Sent]], step: int) -> None:
        machine, progress = self._parts()

        def run() -> list[Arrays]:
            return [machine.run(block, sent) for block, sent in blocks]

        def then(made: Sequence[Arrays]) -> None:
            for (block, _), views in zip(blocks, made, strict=True):
                self._host.update(views)
                if progress.ran(block) and step > self._extras_step + 1:
                    self._extras.clear()
                self._send_parts(step, views)
            self.go_on()

        self.desk.jobs.append(Job(f"step {step}", run, then))

    def _send_parts(self, step: int, made: Arrays) -> None:
        """Sends this server's parts where the last of them was made."""
        assert self._plan is not None
        assert self._progress is not None
        exchange = self._plan.exchange
        if exchange is None or made.keys().isdisjoint(exchange.here):
            return
        makers = {self._plan.makers[name] for name in exchange.here}
        if all(self._progress.done[maker] >= step for maker in makers):
            tensors = [Tensor(name, self._host[name]) for name in exchange.here]
            self.links.send(self._parts_message(step, tensors), self.clock())

    def _parts_message(self, step: int, tensors: Sequence[Tensor]) -> Message:
        body: dict[str, Plain] = {"program": self.job_program, "incarnation": self.incarnation}
        return parts_message(self.desk.name, step, tensors, body)

    def _aside(self) -> Aside:
        """Returns what goes into an own checkpoint besides the state."""
        kept = self.links.kept()
        parts = {step: {t.name: t.array for t in m.tensors} for step, m in kept.items()}
        return Aside(dict(self._extras), self._extras_step, parts)

    # --- values go out -----------------------------------------------------------------------

    def pull(self, request: Request) -> None:
        """Answers by what is ready, and by the rest when it is.

        Raises:
            RefusedError: the server holds no such thing, or not of that step any more.
        """
        names = names_of(request.message)
        if self._progress is not None:
            self._progress.follow(request.step)
        pull = Pull(request, list(dict.fromkeys(names)))
        if self.step >= 0:
            self._check_pull(pull)
        if not any(_same(pull.request, other.request) for other in self.pulls):
            self._check_room([pull.request for pull in self.pulls], request)
            self.pulls.append(pull)
        self.go_on()

    def _check_room(self, waiting: Sequence[Request], request: Request) -> None:
        if sum(other.trainer == request.trainer for other in waiting) >= _MOST_WAITING:
            what = f"{_MOST_WAITING} requests of {request.message.sender} wait already"
            raise RefusedError("bad_message", what, hint="wait for answers before asking for more")

    def missing(self, request: Request) -> dict[str, list[str]]:
        """Returns who a request that waits here waits for, and what of each did not come."""
        if self.step < 0:
            return {"trainer 0": ["the state"]}
        if self._progress is None or request.step <= self.step:
            return {}
        return self._progress.missing()

    def _check_pull(self, pull: Pull) -> None:
        assert self._plan is not None
        for name in pull.left:
            if name not in self._extras and name not in self._plan.known:
                raise RefusedError("bad_message", f"{self.desk.name} does not hold '{name}'")
            if self._is_past(name, pull.request.step):
                what = f"'{name}' is asked for as of step {pull.request.step}"
                what = f"{what}, and {self.desk.name} is past it, at step {self.step}"
                raise RefusedError("bad_message", what, hint="pull before the next push")

    def _serve_pulls(self) -> None:
        if self.step < 0:
            return
        for pull in list(self.pulls):
            try:
                self._check_pull(pull)
            except RefusedError as refusal:
                self.pulls.remove(pull)
                self.desk.error(pull.request.peer, pull.request.message, refusal)
                continue
            ready = [name for name in pull.left if self._is_ready(name, pull.request.step)]
            if ready:
                pull.left = [name for name in pull.left if name not in ready]
                self._send_values(pull.request, ready)
            if pull.left:
                continue
            if not names_of(pull.request.message):
                if self.step < pull.request.step:
                    continue  # it asks for nothing but that the step is applied
                self.desk.answer(pull.request.peer, pull.request.message, Kind.VALUES)
            self.pulls.remove(pull)

    def _send_values(self, request: Request, names: Sequence[str]) -> None:
        held = [(name, self._held(name)) for name in names]
        here = tuple(Tensor(name, array) for name, array in held if array is not None)
        if here:
            self.desk.answer(request.peer, request.message, Kind.VALUES, {}, here)
        rest = [name for name, array in held if array is None]
        if not rest:
            return
        machine = self._parts()[0]

        def then(views: Arrays) -> None:
            tensors = tuple(Tensor(name, views[name]) for name in rest)
            self.desk.answer(request.peer, request.message, Kind.VALUES, {}, tensors)

        def failed(error: Exception) -> None:
            what = f"{', '.join(rest)}: no value as of step {request.step} ({error!r})"
            self.desk.error(request.peer, request.message, RefusedError("bad_message", what))

        self.desk.jobs.append(Job("reading", lambda: machine.copies(rest), then, failed))

    def _held(self, name: str) -> np.ndarray | None:
        if name in self._extras:
            return self._extras[name]
        return self._host.get(name)

    def _is_ready(self, name: str, step: int) -> bool:
        assert self._plan is not None
        assert self._progress is not None
        if name in self._extras:
            return True
        maker = self._plan.makers.get(name)
        return (self.step if maker is None else self._progress.done.get(maker, -1)) >= step

    def _is_past(self, name: str, step: int) -> bool:
        """Tells whether what a name held at a step is no longer there."""
        assert self._plan is not None
        assert self._progress is not None
        if name in self._extras:
            return self._extras_step > step
        maker = self._plan.makers.get(name)
        if maker is None:
            return False
        made = self._progress.done if name in self._host else self._progress.handed
        return made.get(maker, -1) > step

    # --- checkpoints -------------------------------------------------------------------------

    def save(self, request: Request) -> None:
        """Writes a checkpoint once its step is applied."""
        self._parts()
        path = request.message.body.get("path")
        if path is None and self.own is None:
            hint = "start the server with a folder for checkpoints"
            raise RefusedError("bad_message", f"{self.desk.name} keeps no checkpoints", hint=hint)
        if path is not None and not isinstance(path, str):
            raise RefusedError("bad_message", "the path of a save is a string")
        if self._progress is not None:
            self._progress.follow(request.step)
        self._wait_between(request)

    def load(self, request: Request) -> None:
        """Takes the state of a checkpoint, between two steps."""
        self._parts()
        text_of(request.message, "path")
        self._wait_between(request)

    def _wait_between(self, request: Request) -> None:
        if not any(_same(request, other) for other in self.between):
            self._check_room(self.between, request)
            self.between.append(request)
        self.go_on()

    def _serve_between(self) -> None:
        _, progress = self._parts()
        if self._busy or any(step > progress.applied for step in progress.handed.values()):
            return
        for request in list(self.between):
            if request.message.kind is Kind.LOAD:
                self._start_load(request)
            elif request.step <= progress.applied:
                self._start_save(request)
            else:
                continue
            self.between.remove(request)
            if self._busy:
                return

    def _start_save(self, request: Request) -> None:
        machine, progress = self._parts()
        path, step, own = request.message.body.get("path"), progress.applied, self.own
        if path is None and self.saved == step:
            self.desk.answer(request.peer, request.message, Kind.OK, {"step": step})
            return
        aside = self._aside()
        if path is not None and request.step != step:
            what = f"a save of step {request.step} came when step {step} was applied"
            self.desk.error(request.peer, request.message, RefusedError("bad_message", what))
            return

        def run() -> Any:
            arrays = machine.views(machine.plan.state)
            if path is None:
                assert own is not None
                program = self.job_program
                return own.save(machine.plan, arrays, step, job_program=program, aside=aside)
            return save_part(Path(str(path)), machine.plan, arrays, step)

        def then(receipt: Any) -> None:
            if path is None:
                self.saved = step
            body = {"files": receipt.files, "bytes": receipt.bytes, "step": step}
            body["receipt"] = receipt.to_plain()
            self.desk.answer(request.peer, request.message, Kind.OK, body)
            self._free()

        self._hand_out("saving", run, then, request)

    def _start_load(self, request: Request) -> None:
        machine, progress = self._parts()
        path = Path(text_of(request.message, "path"))

        def run() -> tuple[Arrays, int]:
            arrays, step = load_state(path, machine.plan)
            return machine.assign(arrays), step

        def then(loaded: tuple[Arrays, int]) -> None:
            views, step = loaded
            self._host.update(views)
            self._save_own(step, lambda: loaded_and_kept(step))

        def loaded_and_kept(step: int) -> None:
            progress.restart(step)
            self.on_load()
            self.desk.answer(request.peer, request.message, Kind.OK, {"step": step})
            self._free()

        self._hand_out("loading", run, then, request)

    def _hand_out(
        self,
        what: str,
        run: Callable[[], Any],
        then: Callable[[Any], None],
        request: Request,
    ) -> None:
        def failed(error: Exception) -> None:
            self.desk.error(request.peer, request.message, refusal_of("failed", error))
            self._free()

        self._busy = True
        self.desk.jobs.append(Job(what, run, then, failed))

    def _free(self) -> None:
        self._busy = False
        self.go_on()

    def _save_own(self, step: int, after: Callable[[], None]) -> None:
        """Writes an own checkpoint of the state that was just taken in."""
        machine, own, aside = self._parts()[0], self.own, self._aside()
        if own is None:
            after()
            return

        def run() -> Any:
            arrays, program = machine.views(machine.plan.state), self.job_program
            return own.save(machine.plan, arrays, step, job_program=program, aside=aside)

        def then(_: Any) -> None:
            self.saved = step
            after()

        self.desk.jobs.append(Job("saving", run, then))

    # --- word of it --------------------------------------------------------------------------

    def stats(self) -> dict[str, Plain]:
        """Returns what was counted."""
        if self._machine is None or self._progress is None:
            return {"step": -1}
        counts = self._machine.counts
        return {
            "step": self.step,
            "saved": self.saved,
            "received": counts.received,
            "copies_in": counts.copies_in,
            "copies_out": counts.copies_out,
            "merge_s": counts.merge_s,
            "block_s": counts.block_s,
            "duplicates": self._progress.duplicates,
            "queued_bytes": self._progress.queued_bytes,
            "executables": self.cache.compiled,
        }


def _together(ready: Iterable[tuple[BlockPlan, Sent]]) -> list[list[tuple[BlockPlan, Sent]]]:
    """Puts small blocks together, each lot one job: one answer then says what all of them made."""
    found: list[list[tuple[BlockPlan, Sent]]] = []
    room = 0
    for block, sent in ready:
        size = sum(array.nbytes for arrays in sent.values() for array in arrays)
        if size > room or not found:
            found.append([])
            room = _TOGETHER_BYTES
        found[-1].append((block, sent))
        room -= size
    return found


def _same(one: Request, other: Request) -> bool:
    """Tells whether a request is another that came again."""
    same = one.trainer == other.trainer and one.message.number == other.message.number
    return same and one.message.kind is other.message.kind


def _parsed(text: str) -> Program:
    try:
        return parse(text)
    except JaxfleetError as error:
        raise refusal_of("bad_message", error) from error


def _with_constants(program: Program, tensors: Sequence[Tensor]) -> Program:
    """Returns the program with the values of its constants, which come by name."""
    scopes = (program.variables, *(block.variables for block in program.blocks))
    values = {}
    for tensor in tensors:
        for scope in scopes:
            variable = scope.get(tensor.name)
            if variable is not None and variable.constant is not None:
                values[variable.constant.digest] = tensor.array
    return with_values(program, values)
