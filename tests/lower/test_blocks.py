"""Blocks of programs as compiled functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.ir import parse
from jaxfleet.lower import ExecutableCache, host_type, lower_block, to_device, to_host
from jaxfleet.transport.buffers import aligned_copy, aligned_empty, is_aligned

TEXT = """
program p
  param w: f32[4]
  param v: f32[4]
  state m: f32[4]
  const c: f32[4] = [1.0, 2.0, 3.0, 4.0]
  block 0
    temp g: f32[4]
    temp rate: f32[]
    rpc
      listen_and_serv() {optimize_blocks=[^1, ^2, ^3]}
  block 1
    lr_sched
      rate = assign(0.5:f32)
      own: f32[] = assign(rate)
  block 2 in 1
    optimize
      m = jax.add(m, g)
      s: f32[4] = jax.mul(m, rate)
      t: f32[4] = jax.mul(s, c)
      w = jax.sub(w, t)
  block 3 in 1
    optimize
      m = jax.add(m, g)
      x: f32[4] = jax.mul(m, rate)
      y: f32[4] = jax.mul(x, c)
      v = jax.sub(v, y)
"""


def test_a_block_reads_and_writes_what_it_does_not_declare() -> None:
    block = lower_block(parse(TEXT), 2, donate={"m"})
    assert (block.reads, block.writes, block.donated) == (
        ("m", "g", "rate", "w"),
        ("m", "w"),
        ("m",),
    )
    ones = jnp.ones(4)
    m, w = block.function([jnp.ones(4), ones, jnp.float32(0.5), jnp.zeros(4)])
    assert m.tolist() == [2.0] * 4
    assert w.tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_what_is_donated_is_gone_and_the_rest_is_not() -> None:
    block = lower_block(parse(TEXT), 2, donate={"m"})
    m, w = jnp.ones(4), jnp.ones(4)
    block.function([m, jnp.ones(4), jnp.float32(0.5), w])
    assert m.is_deleted()
    assert not w.is_deleted()


def test_blocks_that_differ_in_names_alone_share_an_executable() -> None:
    program, cache = parse(TEXT), ExecutableCache()
    compiled = [
        lower_block(program, index, donate={"m"}, cache=cache).compile() for index in (2, 3)
    ]
    assert compiled[0] is compiled[1]
    assert cache.compiled == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y: f32[4] = jax.mul(x, c)", "y: f32[4] = jax.add(x, c)"),
        ("y: f32[4] = jax.mul(x, c)", "y: f32[4] = jax.mul(c, x)"),
        ("jax.mul(m, rate)\n      y", "jax.mul(m, 0.5:f32)\n      y"),
        ("m = jax.add(m, g)\n      x", "m = jax.add(g, m)\n      x"),
    ],
)
def test_blocks_that_do_something_else_do_not(old: str, new: str) -> None:
    assert old in TEXT
    program, cache = parse(TEXT.replace(old, new)), ExecutableCache()
    for index in (2, 3):
        lower_block(program, index, donate={"m"}, cache=cache).compile()
    assert cache.compiled == 2


def test_what_is_donated_and_what_is_constant_is_part_of_the_key() -> None:
    cache = ExecutableCache()
    other = TEXT.replace("[1.0, 2.0, 3.0, 4.0]", "[1.0, 2.0, 3.0, 5.0]")
    for text, donate in ((TEXT, {"m"}), (TEXT, set[str]()), (other, {"m"})):
        lower_block(parse(text), 2, donate=donate, cache=cache).compile()
    assert cache.compiled == 3


def test_a_cache_forgets_all_but_what_it_is_told_to_keep() -> None:
    cache, runs = ExecutableCache(), dict[str, Any]()
    for text in (TEXT, TEXT.replace("jax.mul(m, rate)", "jax.mul(m, 0.5:f32)")):
        runs[text] = lower_block(parse(text), 2, donate=(), cache=cache).compile()
    assert cache.compiled == 2
    kept, forgotten = runs
    cache.keep([runs[kept]])
    for text, count in ((kept, 2), (forgotten, 3)):
        lower_block(parse(text), 2, donate=(), cache=cache).compile()
        assert cache.compiled == count


def test_a_block_gives_back_what_the_blocks_in_it_read() -> None:
    block = lower_block(parse(TEXT.replace("jax.mul(x, c)", "jax.mul(x, own)")), 1, donate=())
    assert block.writes == ("rate", "own")
    assert [float(value) for value in block.function([])] == [0.5, 0.5]


def test_a_block_that_hands_on_what_it_was_given_copies_it() -> None:
    text = "program p\n  param w: f32[16]\n  block 0\n    temp g: f32[16]\n    rpc\n"
    text += "      listen_and_serv() {optimize_blocks=[^1]}\n  block 1\n    optimize\n"
    text += "      w = assign(g)\n"
    block = lower_block(parse(text), 1, donate=())
    buffer = aligned_copy(np.ones(16, np.float32))
    (w,) = block.function([to_device(buffer, "f32")[0]])
    buffer[:] = 7
    assert w.tolist() == [1.0] * 16


def test_what_an_operator_makes_must_be_what_is_declared() -> None:
    program = parse(TEXT.replace("w = jax.sub(w, t)", "w = jax.reduce_sum(t) {axes=[0]}"))
    block = lower_block(program, 2, donate=())
    with pytest.raises(ProgramError, match=r"'w' is declared f32\[4\], and an operator makes"):
        block.compile()


def test_a_block_is_compiled_for_numbers() -> None:
    block = lower_block(parse(TEXT.replace("param w: f32[4]", "param w: f32[b]")), 2, donate=())
    with pytest.raises(ProgramError, match="a block is compiled for numbers"):
        block.compile()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32", "bool"])
def test_aligned_arrays_are_shared_with_the_device(dtype: str) -> None:
    variable = parse(f"program p\n  param w: {dtype}[5,3]\n").variables["w"]
    held = host_type(variable)
    array = aligned_empty(held.shape, held.dtype)
    array[...] = 1
    assert is_aligned(array)
    value, copied = to_device(array, dtype)
    assert not copied
    back, copied = to_host(value)
    assert not copied
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_travel_as_numbers(impl: str) -> None:
    key: Any = jax.random.key(3, impl=impl)
    dtype = key.dtype.name
    variable = parse(f"program p\n  state k: {dtype}[]\n").variables["k"]
    numbers, _ = to_host(key)
    assert (numbers.shape, numbers.dtype) == (host_type(variable).shape, host_type(variable).dtype)
    value, _ = to_device(aligned_copy(numbers), dtype)
    assert jax.random.bits(value) == jax.random.bits(key)


REWRITTEN = """
program p
  param w: f32[5,2]
  block 0
    rpc
      listen_and_serv() {optimize_blocks=[^1]}
  block 1
    optimize
      Out=[a: f32[2,2], b: f32[3,2]] = split_byref(X=w) {sections=[2, 3]}
      Out=c: f32[5,2] = concat(X=[a, b]) {axis=0}
      Out=d: f32[5,2] = sum(X=[c, w, w])
      Out=e: f32[5,2] = scale(X=d) {bias=1.0, bias_after_scale=false, scale=0.5}
      Out=w = scale(X=e) {bias=1.0, scale=2.0}
"""


def test_the_operators_of_rewrites_compute() -> None:
    w = np.arange(10, dtype=np.float32).reshape(5, 2)
    (made,) = lower_block(parse(REWRITTEN), 1, donate=()).function([jnp.asarray(w)])
    np.testing.assert_array_equal(made, (3 * w + 1) * 0.5 * 2 + 1)


def test_operators_of_the_host_do_not_run_on_a_device() -> None:
    text = REWRITTEN.replace("Out=c: f32[5,2] = concat(X=[a, b]) {axis=0}", "send(X=a)")
    block = lower_block(parse(text.replace("[c, w, w]", "[w, w, w]")), 1, donate=())
    with pytest.raises(ProgramError, match="'send' runs on the host"):
        block.compile()


# Sums of products, where the compiler decides whether a processor rounds one less.
PRODUCTS = """
program p
  param w: f32[rows,cols]
  state m: f32[rows,cols]
  state n: f32[rows,cols]
  block 0
    temp g: f32[rows,cols]
    rpc
      listen_and_serv() {optimize_blocks=[^1]}
  block 1
    optimize
      a: f32[rows,cols] = jax.mul(g, n)
      b: f32[rows,cols] = jax.mul(w, m)
      c: f32[rows,cols] = jax.mul(w, g)
      half: f32[rows,cols] = jax.mul(m, 0.3:f32)
      m = jax.add(half, a)
      fifth: f32[rows,cols] = jax.mul(n, 0.7:f32)
      n = jax.add(fifth, c)
      left: f32[rows,cols] = jax.mul(a, 0.05:f32)
      right: f32[rows,cols] = jax.mul(b, 0.01:f32)
      down: f32[rows,cols] = jax.sub(w, left)
      w = jax.sub(down, right)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("cols", [1, 5, 6, 16])
def test_a_block_gives_on_some_rows_what_it_gives_there_on_all(cols: int) -> None:
    rng, cache = np.random.default_rng(cols), ExecutableCache()
    whole = {name: rng.uniform(0.1, 0.9, (24, cols)).astype(np.float32) for name in "wmng"}

    def run(start: int, rows: int) -> list[Any]:
        text = PRODUCTS.replace("rows", str(rows)).replace("cols", str(cols))
        block = lower_block(parse(text), 1, donate=(), cache=cache)
        values = [jnp.asarray(whole[name][start : start + rows]) for name in block.reads]
        return [np.asarray(x) for x in block.function(values)]

    wanted = run(0, 24)
    for rows in (2, 3, 8, 11):  # a single element is always divided differently
        for start in range(0, 24 - rows, rows):
            for found, all_rows in zip(run(start, rows), wanted, strict=True):
                assert found.tobytes() == all_rows[start : start + rows].tobytes()
