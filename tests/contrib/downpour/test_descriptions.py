"""Descriptions of tables: fluid's defaults, the text form, errors in a text."""

import re
from dataclasses import FrozenInstanceError, fields

import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.messages import description_of
from jaxfleet.errors import ProgramError, TextError
from jaxfleet.fluid import layers
from jaxfleet.fluid.distributed import (
    DownpourServer,
    DownpourSGD,
    DownpourWorker,
    PSParameter,
    from_text,
    to_text,
)
from tests.contrib.downpour.jobs import ctr
from tests.fluid.nets import fresh


def described() -> PSParameter:
    with fresh():
        loss, _, _ = ctr(data_norm=True)
        message, _ = DownpourSGD(0.05).minimize(loss)
    desc = description_of(message)
    assert isinstance(desc, PSParameter)
    return desc


def test_a_text_is_read_as_what_it_was_written_from() -> None:
    desc = described()
    read = from_text(to_text(desc), PSParameter)
    assert all(getattr(read, f.name) == getattr(desc, f.name) for f in fields(desc))
    assert to_text(read) == to_text(desc)


def test_a_text_reads_as_pslibs() -> None:
    text = """
    server_param { downpour_server_param {
        downpour_table_param { table_id: 0  type: PS_SPARSE_TABLE # rows by key
          accessor: { accessor_class: 'DownpourCtrAccessor' fea_dim: 11, embedx_dim: 8;
            sparse_sgd_param { weight_bounds: -10 weight_bounds: 10.5 learning_rate: 5e-2 } }
          compress_in_save: true }
    } }
    trainer_param { skip_op: "lookup_table" skip_op: "a \\"b\\"" }
    """
    read = from_text(text, PSParameter)
    (table,) = read.tables
    assert table.accessor is not None
    assert table.accessor.sparse_sgd_param is not None
    assert table.accessor.sparse_sgd_param.weight_bounds == (-10.0, 10.5)
    assert (table.accessor.fea_dim, table.compress_in_save) == (11, True)
    assert read.trainer_param[0].skip_op == ("lookup_table", 'a "b"')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server_param {\n  nothing: 1\n}", "line 2: ServerParameter has no field 'nothing'"),
        ("server_param {\n", "line 1: the text ends in the middle"),
        ("init_gflags 'x'", "line 1: ':' is missing after 'init_gflags'"),
        ("trainer_param { push_sparse_per_batch: much }", "is a int, and much is none"),
        ("trainer_param 7", "'{' is missing before '7'"),
        ("init_gflags: 'a'\ninit_gflags: 'b'", "line 2: 'init_gflags' is given twice"),
        ("init_gflags: 'a", "is not a word"),
        ("}", "has no field '}'"),
    ],
)
def test_what_is_wrong_with_a_text_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(TextError, match=re.escape(said)):
        from_text(text, PSParameter, "desc.txt")


def test_descriptions_do_not_change() -> None:
    table = described().tables[0]
    with pytest.raises(FrozenInstanceError):
        table.table_id = 3  # type: ignore[misc]  # the point of the test


def test_the_old_server_has_fluids_defaults() -> None:
    sparse, dense, norm = described().tables
    rows, of_dense, counts = sparse.accessor, dense.accessor, norm.accessor
    assert rows is not None
    assert of_dense is not None
    assert counts is not None
    assert (sparse.table_class, sparse.type) == ("DownpourSparseTable", "PS_SPARSE_TABLE")
    assert rows.accessor_class == "DownpourFeatureValueAccessor"
    assert (rows.embedx_dim, rows.embedx_threshold, rows.fea_dim) == (8, 5, 11)
    assert to_text(rows.sparse_sgd_param) == (
        "learning_rate: 0.05\ninitial_g2sum: 3.0\ninitial_range: 0.0001\n"
        "weight_bounds: -10.0\nweight_bounds: 10.0\n"
    )
    assert to_text(rows.downpour_accessor_param) == (
        "nonclk_coeff: 0.1\nclick_coeff: 2.0\nbase_threshold: 0.2\ndelta_threshold: 0.15\n"
        "delta_keep_days: 31.0\nshow_click_decay_rate: 0.999\ndelete_threshold: 0.8\n"
    )
    assert (dense.table_id, of_dense.fea_dim) == (1, 2 + 12 * 2)
    assert of_dense.dense_sgd_param is not None
    assert to_text(of_dense.dense_sgd_param.adam) == (
        "learning_rate: 0.05\navg_decay_rate: 0.999993\nada_decay_rate: 0.9999\n"
        "ada_epsilon: 1e-08\nmom_decay_rate: 0.99\n"
    )
    assert to_text(of_dense.dense_sgd_param.naive) == "learning_rate: 0.0002\n"
    assert (norm.table_id, counts.fea_dim) == (2, 3 * 12)
    assert counts.dense_sgd_param is not None
    assert counts.dense_sgd_param.name == "summary"


def test_servers_and_workers_are_described_table_by_table() -> None:
    with fresh():
        x = fluid.data("x", [None, 3])
        layers.fc(x, 2, param_attr="w", bias_attr=False)
        (w,) = fluid.default_main_program().all_parameters()
    server, worker = DownpourServer(), DownpourWorker(4)
    server.add_sparse_table(0, 0.1, [x], [x])
    server.add_dense_table(1, 0.1, [w], [x])
    server.add_data_norm_table(2, 0.1, [w], [x])
    worker.add_sparse_table(0, 0.1, [x], [x])
    worker.add_dense_table(1, 0.1, [w], [x])
    told = server.get_desc().downpour_server_param
    assert told is not None
    assert [t.table_id for t in told.downpour_table_param] == [0, 1, 2]
    desc = worker.get_desc()
    assert (desc.push_sparse_per_batch, desc.push_dense_per_batch) == (4, 4)
    assert desc.dense_table[0].fea_dim == 6
    assert desc.sparse_table[0].slot_gradient == ("x@GRAD",)
    with pytest.raises(ProgramError, match="sparse table 3 has 1 inputs and 2 outputs"):
        worker.add_sparse_table(3, 0.1, [x], [x, w])
