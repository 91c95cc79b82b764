"""The CNN of `examples/digits.py` in a job whose processes change, or on one device."""

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import optax

import jaxfleet as jf
from examples import digits

BATCHES_OF_EPOCH = 14


def batches(x: Any, y: Any) -> Iterator[Any]:
    """Yields batches of one epoch after the other, as the example does."""
    for epoch in itertools.count():
        yield from digits.batches(x, y, seed=epoch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="single")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    x, x_test, y, y_test = digits.load(0)
    model, steps = digits.CNN(), args.epochs * BATCHES_OF_EPOCH
    variables = model.init(jax.random.key(0), x[:1], train=True)
    tx = jf.distributed_optimizer(optax.adam(optax.cosine_decay_schedule(5e-3, steps)))
    state: Any = digits.TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    strategy = jf.DistributedStrategy(mode=args.mode)
    if args.mode == "pserver":
        strategy = jf.DistributedStrategy(
            mode="pserver", on_trainer_lost="continue", lost_after_s=60.0
        )
    example = (state, next(batches(x, y)))
    with jf.distribute(digits.train_step, example=example, strategy=strategy) as step:
        state, done = step.resume(state)
        for at, batch in enumerate(itertools.islice(batches(x, y), done, steps), done + 1):
            state, metrics = step(state, batch)
            print(f"step {at}, loss {metrics['loss']:.5f}", flush=True)  # noqa: T201
            time.sleep(args.pause)
        last = step.pull(state)
    trained = {"params": last.params, "batch_stats": last.batch_stats}
    correct = model.apply(trained, x_test, train=False).argmax(-1) == y_test
    print(f"test accuracy {correct.mean():.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
