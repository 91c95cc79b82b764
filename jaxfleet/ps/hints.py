"""Hints that servers and ranks give alike."""


def same_leaves_hint(peer: str) -> str:
    """Returns the way out where peers put other leaves into the state than each other.

    Args:
        peer: what they are called: `trainer` or `rank`.
    """
    return (
        f"replace the same leaves of the state on every {peer}, between the same two steps: write "
        f"{{**state, 'epoch': n}} on all of them, not on one; an evaluation by nnx.jit writes all "
        f"Variables back, so evaluate on every {peer}, or a copy (nnx.clone, step.evaluate)"
    )
