"""The thread that waits inside XLA, so that the main thread never does.

Nothing can be raised in a thread that waits for a collective. XLA:CPU runs small programs before
their call returns, so the call itself is such a wait too, and happens in this thread.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import jax


class Task:
    """A computation of the thread."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    def is_done(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        try:
            self._result = self._compute()
            jax.block_until_ready(jax.tree_util.tree_leaves(self._result)[:1])
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            self._error = error
        self._done.set()


class XlaThread:
    """Runs tasks one after another, in a daemon thread."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        threading.Thread(target=self._run, name="jaxfleet-xla", daemon=True).start()

    def begin(self, compute: Callable[[], Any]) -> Task:
        """Returns a task, which runs in its turn."""
        task = Task(compute)
        self._tasks.put(task)
        return task

    def _run(self) -> None:
        while True:
            self._tasks.get().run()
