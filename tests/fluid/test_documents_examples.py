"""The documents' own examples, word for word (`documents/`), run under paddle's names.

Three of them are wrong themselves. `003_nccl2_mode` (and the same lines of the first document)
leaves a string open, `split(",)`, and counts trainers that do not exist; `004_transpile` calls its
transpiler `t` after naming it `transpiler`. Each test contains its changes of the text.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import jaxfleet.compat
from jaxfleet import fluid
from jaxfleet.contrib.downpour import messages, ps_pb2
from jaxfleet.contrib.downpour.descriptions import PSParameter
from jaxfleet.contrib.downpour.node import DownpourServer, DownpourWorker
from jaxfleet.contrib.downpour.worker import described_tables
from jaxfleet.fluid.backward import append_backward
from jaxfleet.fluid.distribute_lookup_table import (
    find_distributed_lookup_table,
    find_distributed_lookup_table_inputs,
    find_distributed_lookup_table_outputs,
)
from jaxfleet.fluid.distributed import DownpourSGD
from tests.contrib.downpour.jobs import ctr, dataset, files
from tests.fluid.nets import fresh

DOCUMENTS = Path(__file__).with_name("documents")
_PARTS: dict[str, Any] = {
    "append_backward": append_backward,
    "find_distributed_lookup_table": find_distributed_lookup_table,
    "find_distributed_lookup_table_inputs": find_distributed_lookup_table_inputs,
    "find_distributed_lookup_table_outputs": find_distributed_lookup_table_outputs,
    "DownpourServer": DownpourServer,
    "DownpourWorker": DownpourWorker,
    "pslib": ps_pb2,
    "text_format": messages,
    "fluid": fluid,
}


@pytest.fixture
def paddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yields `paddle`, with two devices, new programs and a new scope."""
    monkeypatch.setenv("CPU_NUM", "2")
    jaxfleet.compat.install()
    with fresh(), fluid.scope_guard(fluid.Scope()):
        yield sys.modules["paddle"]
    jaxfleet.compat.uninstall()


def run(name: str, *changes: tuple[str, str], **given: Any) -> dict[str, Any]:
    """Runs an example; returns its names.

    Args:
        name: of its file.
        changes: replacements, where the text itself is wrong.
        given: names that the text presupposes.
    """
    text = (DOCUMENTS / f"{name}.txt").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = dict(given)
    exec(compile(text, name, "exec"), names)  # noqa: S102  # the documents' own examples
    return names


@pytest.mark.filterwarnings("ignore:a GPU is asked for and JAX has none here")
@pytest.mark.parametrize(
    "name",
    [
        "002_parallel_executor",
        "002_parallel_executor_run",
        "002_parallel_executor_drop_local_exe_scopes",
    ],
)
def test_an_example_of_parallel_executor_runs_as_it_stands(name: str, paddle: Any) -> None:
    found = run(name)
    assert found["loss_data"].shape == (2,)
    assert np.isfinite(found["loss_data"]).all()


def line() -> fluid.Variable:
    """Builds a net and its updates, which the examples of transpilers presuppose."""
    x, y = fluid.layers.data("x", [13]), fluid.layers.data("y", [1])
    loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
    fluid.optimizer.SGD(0.1).minimize(loss)
    return loss


@pytest.mark.parametrize(("role", "made"), [("PSERVER", "pserver"), ("TRAINER", "trainer")])
def test_the_example_of_servers_runs_as_it_stands(
    role: str, made: str, paddle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os  # noqa: PLC0415  # the example takes it for granted

    waited: list[list[str]] = []
    module = "jaxfleet.fluid.transpiler.distribute_transpiler"
    monkeypatch.setattr(f"{module}.wait_server_ready", waited.append)  # no server at 192.168.0.1
    monkeypatch.setenv("PADDLE_TRAINING_ROLE", role)
    line()
    found = run("003_pserver_mode", fluid=paddle.fluid, os=os)
    assert found[f"{made}_program"].global_block().ops
    endpoints = found["pserver_endpoints"].split(",")
    assert waited == ([endpoints] if role == "TRAINER" else [])


def test_the_example_of_nccl2_runs_with_its_string_closed(paddle: Any) -> None:
    workers = "127.0.0.1:6174,127.0.0.1:6175"  # the second one does not wait
    given = {"trainer_id": 1, "workers": workers, "trainers": workers, "use_cuda": False}
    given |= {"curr_ep": "127.0.0.1:6175", "loss_var": line(), "fluid": paddle.fluid}
    found = run("003_nccl2_mode", ('split(",))', 'split(","))'), **given)
    assert fluid.default_startup_program().global_block().ops[-1].type == "gen_nccl_id"
    assert isinstance(found["exe"], fluid.ParallelExecutor)


def test_the_example_of_transpile_runs_with_its_name_mended(paddle: Any) -> None:
    line()
    found = run("004_transpile", ("t.transpile", "transpiler.transpile"), fluid=paddle.fluid)
    assert found["transpiler"].sync_mode is False
    assert found["transpiler"].trainer_num == 2


def minimizer(name: str) -> Any:
    """Returns an optimizer whose method is the documents' body, over jaxfleet's parts."""
    method = "minimize" if name.startswith("004_minimize") else "_minimize"
    body = run(name, **_PARTS)[method]
    return type("Pasted", (DownpourSGD,), {method: body})(0.1, 2)


def test_the_body_for_a_loss_describes_what_ours_does(paddle: Any) -> None:
    loss, _, _ = ctr()
    ps_param, skipped = minimizer("004_minimize_of_a_loss").minimize(loss)
    assert skipped == ["lookup_table", "lookup_table_grad"]
    with fresh():
        ours = messages.description_of(DownpourSGD(0.1, 2).minimize(ctr()[0])[0])
    assert isinstance(ours, PSParameter)
    found = messages.description_of(ps_param)
    assert [t.table_id for t in found.tables] == [t.table_id for t in ours.tables] == [0, 1]
    assert found.tables[0] == ours.tables[0]
    assert found.trainer_param[0].sparse_table == ours.trainer_param[0].sparse_table
    assert list(found.trainer_param[0].skip_op) == skipped
    # The document's body leaves the table of rows among the dense parameters, too.
    assert found.trainer_param[0].dense_table[0].dense_variable_name == ("b", "emb", "w")


@pytest.mark.parametrize(
    "name",
    ["004_minimize_of_losses", "004_private_minimize", "004_private_minimize_with_a_strategy"],
)
def test_the_bodies_for_losses_describe_the_tables_of_their_program(name: str, paddle: Any) -> None:
    loss, _, _ = ctr(data_norm=True)
    main = fluid.default_main_program()
    made = minimizer(name)
    returned = (made.minimize if name.startswith("004_minimize") else made._minimize)([loss])
    assert returned[0] is None
    tables = described_tables(main)
    assert [t.table_id for t in tables.tables] == [0, 1, 2]
    (trainer,) = tables.trainer_param
    names = {"norm.batch_size", "norm.batch_sum", "norm.batch_square_sum"}
    assert set(trainer.dense_table[1].dense_variable_name) == names


def test_the_body_with_a_strategy_reads_a_description(paddle: Any, tmp_path: Path) -> None:
    path = tmp_path / "fleet_desc.prototxt"
    path.write_text(
        "server_param { downpour_server_param { downpour_table_param {"
        "  table_id: 0 type: PS_SPARSE_TABLE accessor { embedx_dim: 3 fea_dim: 6 } } } }"
        'trainer_param { skip_op: "mine" }'
    )
    strategy = {"fleet_desc_file": str(path), "use_cvm": True}
    loss, _, _ = ctr()
    pasted = minimizer("004_private_minimize_with_a_strategy")
    _, _, opt_info = pasted._minimize([loss], strategy=strategy)
    with fresh():
        _, _, ours = DownpourSGD(0.1, 2)._minimize([ctr()[0]], strategy=strategy)
    for found in (opt_info, ours):
        desc = messages.description_of(found["fleet_desc"])
        assert desc.tables[0].accessor.embedx_dim == 3
        assert desc.trainer_param[0].skip_op == ("mine",)
        assert found["use_cvm"] is True


def test_ours_trains_what_the_documents_bodies_describe(paddle: Any, tmp_path: Path) -> None:
    loss, _, fed = ctr()
    ours = DownpourSGD(0.1)
    assert ".batch_size" in ours.data_norm_name
    ours._minimize([loss], strategy={})
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    exe.train_from_dataset(dataset=dataset(fed, files(tmp_path, 8), 4))
