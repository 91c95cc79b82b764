"""Draws docs/memory-curve.svg and docs/timeline.svg, the plots in memory.md and watching.md.

python docs/draw_plots.py

It takes the extras `plot` and `examples`, and starts a job of two servers and two trainers.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxfleet as jf
from jaxfleet.observability import merge
from jaxfleet.observability.timeline_plot import plot_timeline

HERE = Path(__file__).parent
CTR = HERE.parent / "examples" / "ctr.py"
JOB = ["launch", "--servers", "2", "--trainers", "2", str(CTR), "--mode", "pserver"]
SHOWN_S = 0.25  # of the job, in its middle
TX = jf.distributed_optimizer(optax.sgd(0.1))


def deep_step(state: Any, batch: jax.Array) -> Any:
    """The step of memory.md."""

    def loss_fn(layers: Any) -> jax.Array:
        h = batch
        for w in layers:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    loss, grads = jax.value_and_grad(loss_fn)(state["layers"])
    updates, opt_state = TX.update(grads, state["opt_state"], state["layers"])
    return {"layers": optax.apply_updates(state["layers"], updates), "opt_state": opt_state}, loss


def draw_memory() -> None:
    layers = [jnp.eye(256) for _ in range(12)]
    example = {"layers": layers, "opt_state": TX.init(layers)}, jnp.ones((512, 256))
    budget = jf.DistributedStrategy(mode="single", memory_budget=0.7)
    step: jf.TrainingStep = jf.distribute(deep_step, example, budget)
    step.memory_report().plot(HERE / "memory-curve.svg")


def draw_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "JAXFLEET_TRACE_DIR": folder}
        command = [sys.executable, "-m", "jaxfleet", *JOB]
        subprocess.run(command, check=True, cwd=folder, env=environment)
        timeline = merge(Path(folder))
    spans = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    middle = max(event["ts"] + event["dur"] for event in spans) / 2e6
    plot_timeline(timeline, HERE / "timeline.svg", first_s=middle, last_s=middle + SHOWN_S)


if __name__ == "__main__":
    draw_memory()
    draw_timeline()
