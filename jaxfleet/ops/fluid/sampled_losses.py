"""Losses over many classes: noise-contrastive, hierarchical sigmoid, sampled softmax."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxfleet.ops.fluid.arrays import key_of
from jaxfleet.ops.fluid.schema import Attributes, BySlot, Gradient, Value, fluid_op
from jaxfleet.ops.registry import Array

UNIFORM, LOG_UNIFORM = 0, 1
_LARGE = 1e20  # stands for infinity in logits, as in fluid
_MOST = 40.0  # a decision's score is clipped to [-40, 40], as in fluid


def _drawn(attrs: Attributes, run: Array | None, shape: tuple[int, ...]) -> Array:
    """Samples classes; with `log_uniform` by Zipf's law, the first most often."""
    count = attrs["num_total_classes"]
    key = key_of(attrs, run)
    if attrs["sampler"] == UNIFORM:
        return jax.random.randint(key, shape, 0, count)
    drawn = jnp.exp(jax.random.uniform(key, shape) * math.log(count)) - 1
    return jnp.minimum(drawn.astype(jnp.int32), count - 1)


def _expected(attrs: Attributes, classes: Array) -> Array:
    """Expected count of each class among a row's samples."""
    count = attrs["num_total_classes"]
    if attrs["sampler"] == UNIFORM:
        share = jnp.full(classes.shape, 1 / count)
    else:
        share = jnp.log((classes + 2.0) / (classes + 1.0)) / math.log(count)
    return share * attrs["num_neg_samples"]


def _nce_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    x, weight, classes, out = (
        reads[n] for n in ("Input", "Weight", "SampleLabels", "SampleLogits")
    )
    expected = _expected(attrs, classes)
    is_true = jnp.arange(classes.shape[1]) < reads["Label"].reshape(x.shape[0], -1).shape[1]
    slope = jnp.where(is_true, expected * (out - 1), out * (1 - out)) / (out + expected)
    slope = slope * grads["Cost"]
    if reads["SampleWeight"] is not None:
        slope = slope * reads["SampleWeight"].reshape(-1, 1)
    into_weight = jnp.zeros_like(weight).at[classes].add(slope[..., None] * x[:, None])
    made = {"Input": jnp.einsum("bs,bsd->bd", slope, weight[classes]), "Weight": into_weight}
    if reads["Bias"] is not None:
        bias = reads["Bias"]
        made["Bias"] = jnp.zeros(bias.size, bias.dtype).at[classes].add(slope).reshape(bias.shape)
    return made


@fluid_op("nce", inputs="Input Label Weight Bias? SampleWeight? Run?",
          outputs="Cost SampleLogits SampleLabels",
          attrs={"num_total_classes": 1, "num_neg_samples": 10, "seed": 0, "sampler": UNIFORM,
                 "is_sparse": False, "remote_prefetch": False, "custom_neg_classes": []},
          gradient=Gradient("nce_grad", ("Input", "Label", "Weight", "Bias", "SampleWeight",
                                         "SampleLogits", "SampleLabels"),
                            ("Input", "Weight", "Bias"), _nce_back))  # fmt: skip
def nce(
    attrs: Attributes, x: Array, label: Array, weight: Array, bias: Array | None,
    sample_weight: Array | None, run: Array | None,
) -> Value:  # fmt: skip
    """Noise-contrastive estimation (Gutmann and Hyvarinen, 2010).

    f32[b,d], i64[b,true] -> f32[b,1], and the chosen classes of each row with their sigmoids.
    """
    count = x.shape[0]
    true = label.reshape(count, -1)
    if given := attrs["custom_neg_classes"]:
        others = jnp.broadcast_to(jnp.asarray(given, true.dtype), (count, len(given)))
    else:
        others = _drawn(attrs, run, (count, attrs["num_neg_samples"])).astype(true.dtype)
    classes = jnp.concatenate([true, others], axis=1)
    score = jnp.einsum("bd,bsd->bs", x, weight[classes])
    score = score if bias is None else score + bias.reshape(-1)[classes]
    out, expected = jax.nn.sigmoid(score), _expected(attrs, classes)
    is_true = jnp.arange(classes.shape[1]) < true.shape[1]
    cost = -jnp.log(jnp.where(is_true, out, expected) / (out + expected))
    cost = cost if sample_weight is None else cost * sample_weight.reshape(-1, 1)
    return cost.sum(axis=1, keepdims=True), out, classes


@fluid_op("hierarchical_sigmoid", inputs="X W Label PathTable? PathCode? Bias?",
          outputs="Out PreOut W_Out",
          attrs={"num_classes": 2, "is_sparse": False, "remote_prefetch": False},
          gradient="X W Label PathTable PathCode Bias -> X W Bias")  # fmt: skip
def hierarchical_sigmoid(
    attrs: Attributes, x: Array, weight: Array, label: Array, table: Array | None,
    code: Array | None, bias: Array | None,
) -> Value:  # fmt: skip
    """Hierarchical softmax with sigmoid decisions (Morin and Bengio, 2005): f32[b,1].

    A path shorter than the longest costs log 2 for each missing decision, as in fluid: a constant,
    without gradient.
    """
    if table is None or code is None:
        nodes, turns, is_there = _complete_tree(label.reshape(-1), attrs["num_classes"])
    else:
        nodes, turns, is_there = jnp.maximum(table, 0), code, table >= 0
    score = jnp.einsum("bd,bnd->bn", x, weight[nodes])
    score = score if bias is None else score + bias.reshape(-1)[nodes]
    score = jnp.where(is_there, jnp.clip(score, -_MOST, _MOST), 0)
    soft = jax.nn.softplus(score)
    right = jnp.where(is_there & (turns > 0), score, 0)
    return (soft - right).sum(axis=1, keepdims=True), soft, weight


def _complete_tree(label: Array, classes: int) -> tuple[Array, Array, Array]:
    """Nodes, branches and validity mask of the paths to classes in a complete tree.

    The leaf of a class is number `class + classes` of a heap whose root is 1.
    """
    leaf = label.astype(jnp.int32) + classes
    bits = jnp.arange((classes - 1).bit_length())
    nodes = (leaf[:, None] >> (bits + 1)) - 1
    turns = (leaf[:, None] >> bits) & 1
    return jnp.maximum(nodes, 0), turns, nodes >= 0


def _sampled_back(_: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    rows, classes, _zero = reads["LogitsDim"].shape
    slope, samples = grads["SampledLogits"], reads["Samples"]
    into = jnp.zeros((rows, classes), slope.dtype)
    return {"Logits": into.at[jnp.arange(rows)[:, None], samples].add(slope)}


@fluid_op("sample_logits",
          inputs="Logits Labels CustomizedSamples? CustomizedProbabilities? Run?",
          outputs="Samples Probabilities SampledLogits SampledLabels LogitsDim LabelsDim",
          attrs={"use_customized_samples": False, "uniq": True, "remove_accidental_hits": True,
                 "num_samples": 1, "seed": 0},
          gradient=Gradient("sample_logits_grad", ("LogitsDim", "Samples"), ("Logits",),
                            _sampled_back))  # fmt: skip
def sample_logits(
    attrs: Attributes, logits: Array, labels: Array, samples: Array | None,
    shares: Array | None, run: Array | None,
) -> Value:  # fmt: skip
    """Logits of true and sampled classes, less the log of the classes' sampling probability.

    f32[b,classes], i64[b,1] -> f32[b,1+samples] (Jean et al., 2015). The sampled classes are
    distinct and shared by all rows; small ones are more frequent, by Zipf's law.
    """
    rows, true = labels.shape
    if samples is None or shares is None:
        drawn, tries = _drawn_apart(
            key_of(attrs, run), logits.shape[1], attrs["num_samples"], labels.dtype
        )
        others = jnp.broadcast_to(drawn, (rows, len(drawn)))
        samples = jnp.concatenate([labels, others], axis=1)
        shares = _expected_apart(samples, logits.shape[1], attrs["num_samples"], tries)
    made = jnp.take_along_axis(logits, samples, axis=1)
    if attrs["remove_accidental_hits"]:
        is_true = (samples[:, None, :] == samples[:, :true, None]).any(1)
        made = jnp.where(is_true & (jnp.arange(samples.shape[1]) >= true), made - _LARGE, made)
    made = jnp.clip(made - jnp.clip(jnp.log(shares), -_LARGE, _LARGE), -_LARGE, _LARGE)
    places = jnp.broadcast_to(jnp.arange(true, dtype=labels.dtype), labels.shape)
    kept = [jnp.zeros((*x.shape, 0), x.dtype) for x in (logits, labels)]
    return samples, shares, made, places, *kept


def _drawn_apart(key: Array, classes: int, count: int, dtype: Any) -> tuple[Array, Array]:
    """Samples by Zipf's law until `count` classes differ; returns them, and the number of draws."""

    def draw(state: Any) -> Any:
        drawn, is_drawn, found, tries = state
        share = jax.random.uniform(jax.random.fold_in(key, tries))
        new = (jnp.exp(share * math.log(classes + 1)) - 1).astype(drawn.dtype) % classes
        drawn = jnp.where(is_drawn[new], drawn, drawn.at[found].set(new))
        return drawn, is_drawn.at[new].set(True), found + ~is_drawn[new], tries + 1

    start = (jnp.zeros(count, dtype), jnp.zeros(classes, bool), 0, 0)
    drawn, _, _, tries = jax.lax.while_loop(lambda state: state[2] < count, draw, start)
    return drawn, tries


def _expected_apart(samples: Array, classes: int, count: int, tries: Array) -> Array:
    """Expected counts of classes among `count` distinct samples after `tries` draws."""
    share = jnp.log((samples + 2.0) / (samples + 1.0)) / math.log(classes + 1)
    return jnp.where(tries == count, share * count, -jnp.expm1(tries * jnp.log1p(-share)))
