"""CPU time of a call, independent of other load."""

import gc
import time
from collections.abc import Callable


def seconds(run: Callable[[], object]) -> float:
    """Returns the CPU time of a call, the best of three, without garbage collection."""
    times = []
    gc.disable()
    try:
        for _ in range(3):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(times)
