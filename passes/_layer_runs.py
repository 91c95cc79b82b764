"""Runs of equal groups: each takes what the one before made, or what was there before them all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxfleet.ir import Operand
from jaxfleet.passes._layer_forms import LayerForm


@dataclass(frozen=True)
class LayerRun:
    """Groups that stand one after another and can be the turns of one loop.

    Attributes:
        first: the place of the first among the program's groups.
        forms: the groups; their texts are equal.
        carried: what a group takes of the one before: slot, and the slot that it was made as.
    """

    first: int
    forms: tuple[LayerForm, ...]
    carried: Mapping[int, int]

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.forms)

    @property
    def end(self) -> int:
        """The place behind the last group."""
        return self.first + self.count

    @cached_property
    def constant(self) -> Mapping[int, Operand]:
        """What is the same in all turns, by slot."""
        first = self.forms[0].inputs
        return {slot: first[slot] for slot in self._others if len(set(self.taken(slot))) == 1}

    @cached_property
    def updated(self) -> Mapping[int, int]:
        """What each turn has of its own and overwrites: slot, and the slot of the new value."""
        found = {}
        for slot in self._others:
            new = {
                form.finals.get(name) if isinstance(name, str) else None
                for form, name in zip(self.forms, self.taken(slot), strict=True)
            }
            if len(new) == 1 and (at := new.pop()) is not None:
                found[slot] = at
        return found

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The slots that each turn has something of its own for, and only reads."""
        return tuple(s for s in self._others if s not in self.constant and s not in self.updated)

    def taken(self, slot: int) -> list[Operand]:
        """Returns what the groups take for a slot, in order."""
        return [form.inputs[slot] for form in self.forms]

    def made(self, slot: int) -> list[str | None]:
        """Returns the variable of each group that holds a slot in the end; None, if lost later."""
        last = {name: n for n, form in enumerate(self.forms) for name in form.finals}
        names = [form.names.get(slot) for form in self.forms]
        return [name if name and last[name] == n else None for n, name in enumerate(names)]

    @property
    def _others(self) -> list[int]:
        return [slot for slot in self.forms[0].inputs if slot not in self.carried]


def find_runs(forms: Sequence[LayerForm | None], least: int) -> list[LayerRun]:
    """Returns the runs of at least so many groups, in order.

    Args:
        forms: of a program's groups, in order; None for one that cannot be in a loop.
        least: groups.
    """
    found, first = list[LayerRun](), 0
    while first < len(forms):
        run = _from(forms, first)
        if run is None or run.count < least:
            first += 1
        else:
            found.append(run)
            first = run.end
    return found


def _from(forms: Sequence[LayerForm | None], first: int) -> LayerRun | None:
    """Returns the longest run that begins with a group."""
    form = forms[first]
    if form is None:
        return None
    run, carried, written = [form], dict[int, int](), set(form.finals)
    for after in forms[first + 1 :]:
        if after is None or after.text != form.text:
            break
        links = _links(run[-1], after)
        if len(run) == 1:
            carried = links
        if links != carried or not _is_fed(after, links, written):
            break
        run.append(after)
        written.update(after.finals)
    return LayerRun(first, tuple(run), carried)


def _links(before: LayerForm, after: LayerForm) -> dict[int, int]:
    """Returns what a group takes of what the one before it made."""
    return {
        slot: before.finals[name]
        for slot, name in after.inputs.items()
        if isinstance(name, str) and name in before.finals
    }


def _is_fed(form: LayerForm, links: Mapping[int, int], written: set[str]) -> bool:
    """Tells whether a group takes nothing of groups in the run but of the one before."""
    if any(form.types[slot] != form.types[at] for slot, at in links.items()):
        return False
    others = (name for slot, name in form.inputs.items() if slot not in links)
    return not any(name in written for name in others if isinstance(name, str))
