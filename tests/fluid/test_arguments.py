"""Every argument has an effect, except those that `docs/fluid-arguments.md` lists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.flags import HINTS
from jaxfleet.fluid.layers import one_hot
from tests.fluid.nets import fresh

ROOT = Path(fluid.__file__).parent
ROOTS = (ROOT, ROOT.parent / "contrib")
PAGE = Path(__file__).parents[2] / "docs" / "fluid-arguments.md"
TEXT = PAGE.read_text()
STRATEGIES = (fluid.BuildStrategy, fluid.ExecutionStrategy)

# Not called by scripts: their arguments belong to a protocol that other implementations read.
_INTERNAL = {
    *("initializer.py", "optimizer/base.py", "optimizer/rules.py"),
    *("DenseAdam", "DenseNaive", "DenseSummary", "ServerTables"),
}


def _refuses_or_warns(function: ast.FunctionDef) -> bool:
    """Whether a function is only declared, or only raises or warns."""
    last = function.body[-1]
    if isinstance(last, ast.Raise):
        return True
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant):
        return True  # abstract, or a layer whose operator takes all of its arguments
    is_call = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
    return is_call and ast.unparse(last).startswith(("warnings.warn(", "_not_called("))


def _unread(function: ast.FunctionDef) -> list[str]:
    given = function.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    loads = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return [n for n in names if n not in loads and n not in {"self", "cls"} and n[0] != "_"]


def _functions(tree: ast.AST, around: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            is_private = node.name.startswith("_") and node.name != "__init__"
            if not is_private:
                yield (around + node.name).removesuffix(".__init__"), node


def _silent() -> Iterator[tuple[str, str]]:
    found = ((root, path) for root in ROOTS for path in sorted(root.glob("**/*.py")))
    for folder, path in found:
        if path.relative_to(folder).as_posix() in _INTERNAL:
            continue
        for name, function in _functions(ast.parse(path.read_text())):
            if name.partition(".")[0] not in _INTERNAL and not _refuses_or_warns(function):
                yield from ((name, argument) for argument in _unread(function))


def _listed() -> Iterator[tuple[str, str]]:
    for name, arguments in re.findall(r"`([\w.]+)\(([\w, ]+)\)`", TEXT.split("## Silent")[1]):
        yield from ((name, argument) for argument in arguments.split(", "))


def test_the_arguments_that_nothing_reads_are_those_that_the_page_lists() -> None:
    of_run = {"feed_var_name", "fetch_var_name", "use_program_cache"}  # passed on, then dropped
    listed = set(_listed())
    assert {name for where, name in listed if where == "Executor.run"} == of_run
    assert {pair for pair in listed if pair[0] != "Executor.run"} == set(_silent())


def test_every_field_of_the_strategies_is_in_the_table_with_what_it_does() -> None:
    rows = dict(re.findall(r"^\| `(\w+Strategy\.\w+)` \| (\w+)", TEXT, re.MULTILINE))
    assert rows == {
        f"{kind.__name__}.{name}": kind.effect_of(name)
        for kind in STRATEGIES
        for name in kind._defaults
    }


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_field_acts_or_is_a_hint_or_has_a_reason(kind: type[fluid.BuildStrategy]) -> None:
    groups = [kind._acting, kind._hints, frozenset(kind._reasons)]
    assert sum(map(len, groups)) == len(frozenset.union(*groups)) == len(kind._defaults)


def test_every_warning_is_on_the_page() -> None:
    for path in (path for root in ROOTS for path in root.glob("**/*.py")):
        for call in re.findall(r'warn_no_effect\(\s*"([^"]+)"', path.read_text()):
            words = re.findall(r"\w+", call.replace("'s ", " ").replace("sync_mode=True", ""))
            assert all(word in TEXT for word in words if word != "and"), call


def test_flags_without_effect_warn_and_hints_are_silent() -> None:
    with pytest.warns(UserWarning, match="FLAGS_benchmark has no effect here: runs are not"):
        fluid.set_flags({"FLAGS_benchmark": True})
    fluid.set_flags({"FLAGS_benchmark": False})
    name = "FLAGS_eager_delete_tensor_gb"
    assert name in HINTS
    fluid.set_flags({name: 1.0})
    assert fluid.get_flags(name) == {name: 1.0}
    fluid.set_flags({name: 0.0})


def test_a_numbered_device_is_warned_of_and_a_kind_is_not() -> None:
    with fluid.device_guard("cpu"):
        pass
    warned = pytest.warns(UserWarning, match=r"device_guard\('gpu:1'\) has no effect here")
    with warned, fluid.device_guard("gpu:1"):
        pass


def test_a_transpilers_log_has_the_place_of_every_block(capsys: pytest.CaptureFixture[str]) -> None:
    config = fluid.DistributeTranspilerConfig()
    config.print_log, config.wait_port = True, False
    with fresh() as (main, startup):
        x = fluid.data("x", [None, 1000])
        out = fluid.layers.fc(x, 1000, param_attr="w", bias_attr=False)
        fluid.optimizer.SGD(0.1).minimize(fluid.layers.mean(out))
        servers = "127.0.0.1:6174,127.0.0.1:6175"
        fluid.DistributeTranspiler(config).transpile(
            0, main, pservers=servers, trainers=1, startup_program=startup
        )
    assert capsys.readouterr().out.splitlines() == [
        "w.block0: [500, 1000] of 'w' on 127.0.0.1:6174",
        "w.block1: [500, 1000] of 'w' on 127.0.0.1:6175",
    ]


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_number_outside_of_one_hots_rows_is_nan_unless_it_is_allowed(*, is_allowed: bool) -> None:
    with fresh() as (main, _):
        found = one_hot(fluid.data("x", [None, 1], "int64"), 2, allow_out_of_range=is_allowed)
        (rows,) = fluid.Executor().run(main, {"x": np.array([[1], [2]])}, [found])
    assert rows[0].tolist() == [0.0, 1.0]
    assert rows[1].tolist() == [0.0, 0.0] if is_allowed else str(rows[1]) == "[nan nan]"
