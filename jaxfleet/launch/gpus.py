"""GPUs of this machine, found without starting jax, which would take their memory."""

import re
from pathlib import Path

from jaxfleet.env import read_visible_gpus, wants_gpus
from jaxfleet.errors import AssertedError

_DEVICES = Path("/dev")


def seen_gpus() -> tuple[int, ...]:
    """Returns the GPUs visible to jax, by its numbers for them: from 0 on."""
    if not wants_gpus():
        return ()
    named = read_visible_gpus()
    if named is None:
        devices = [path.name for path in _DEVICES.glob("nvidia*")]
        named = tuple(name for name in devices if re.fullmatch(r"nvidia\d+", name))
    return tuple(range(len(named)))


def selected_gpus(words: str) -> tuple[int, ...]:
    """Converts a user's GPU numbers, those of `CUDA_VISIBLE_DEVICES` (`4,5`), to jax's."""
    asked = [word.strip() for word in words.split(",") if word.strip()]
    visible = read_visible_gpus() or ()
    for word in asked:
        if visible and word not in visible:
            hint = f"CUDA_VISIBLE_DEVICES has {','.join(visible)}"
            raise AssertedError(f"GPU {word} is none of the visible ones", hint=hint)
        if not visible and not word.isdecimal():
            raise AssertedError(f"GPU {word!r} is no number", hint="write 0,1")
    return tuple(visible.index(word) if visible else int(word) for word in asked)
