"""A task of TensorFlow's ParameterServerStrategy: a server of a cluster, or its coordinator.

    tensorflow_training.py ps 0 ADDRESSES
    tensorflow_training.py chief 0 ADDRESSES

ADDRESSES are JSON: {"ps": [...], "worker": [...], "chief": [...]}. The coordinator schedules the
steps of a checkpoint at once, waits for them in order, and saves.
"""

import argparse
import json
import os
import time
from typing import Any

import tensorflow as tf

from systems import task

Variables = dict[str, Any]


def serve(role: str, number: int, cluster: Any) -> None:
    """Serves variables or computes for the coordinator, until the process is ended."""
    task.report(f"{role}-{number}", "process", os.getpid())
    options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)  # of closures that wait
    server = tf.distribute.Server(
        cluster, job_name=role, task_index=number, config=options, protocol="grpc"
    )
    server.join()


def variables(strategy: Any) -> tuple[Variables, Variables]:
    """Returns parameters and momenta; the strategy deals them to the servers in turn."""
    with strategy.scope():
        parameters = {name: tf.Variable(value) for name, value in task.start().items()}
        momenta = {
            name: tf.Variable(tf.zeros_like(value))
            for name, value in parameters.items()
            if name not in task.COUNTS
        }
    return parameters, momenta


def train_step(parameters: Variables, momenta: Variables) -> Any:
    """Returns the function that a worker computes for a step."""

    @tf.function
    def step(x: Any, y: Any, number: Any) -> Any:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ parameters["a"] + parameters["b"])
            logits = hidden @ parameters["c"] + parameters["d"]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_mean(losses)
        names = list(momenta)
        grads = tape.gradient(loss, [parameters[name] for name in names])
        for name, grad in zip(names, grads, strict=True):
            momentum = momenta[name].assign(task.MOMENTUM * momenta[name] + grad)
            parameters[name].assign_sub(task.RATE * momentum)
        for name in task.COUNTS:
            parameters[name].assign_add(tf.one_hot(number - 1, task.STEPS))
        return loss

    return step


def coordinate(cluster: Any) -> None:
    """Trains; a server that is lost ends this process with the coordinator's error."""
    task.report("chief-0", "process", os.getpid())
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    parameters, momenta = variables(strategy)
    done = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(done=done, parameters=parameters, momenta=momenta)
    manager = tf.train.CheckpointManager(checkpoint, str(task.saves()), max_to_keep=3)
    checkpoint.restore(manager.latest_checkpoint)
    task.report("chief-0", "restored", int(done))
    step = train_step(parameters, momenta)
    while int(done) < task.STEPS:
        scheduled = []
        for number in range(int(done) + 1, int(done) + task.SAVE_EVERY + 1):
            x, y = task.batch_of(number)
            given = (tf.constant(x), tf.constant(y), tf.constant(number))
            scheduled.append((number, coordinator.schedule(step, args=given)))
        for number, loss in scheduled:
            loss.fetch()
            task.report("chief-0", "step", number)
            time.sleep(task.PAUSE_S)
        coordinator.join()
        done.assign_add(task.SAVE_EVERY)
        manager.save(checkpoint_number=int(done))
        task.report("chief-0", "saved", int(done))
    task.finish({name: each.numpy() for name, each in parameters.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description="A task of ParameterServerStrategy.")
    parser.add_argument("role", choices=("ps", "worker", "chief"))
    parser.add_argument("number", type=int)
    parser.add_argument("addresses", type=json.loads)
    arguments = parser.parse_args()
    cluster = tf.train.ClusterSpec(arguments.addresses)
    if arguments.role == "chief":
        coordinate(cluster)
    else:
        serve(arguments.role, arguments.number, cluster)


if __name__ == "__main__":
    main()
