"""What servers and workers of a Downpour job are told, as plain data.

The fields have pslib's names, so that its text files are read (`text`). A field that is None is
not said; a repeated one is a tuple.
"""

from dataclasses import dataclass

from jaxfleet.fluid.distributed.text import to_text

SPARSE, DENSE = "PS_SPARSE_TABLE", "PS_DENSE_TABLE"


@dataclass(frozen=True)
class SparseSGDRuleParameter:
    """How the rows of a sparse table are updated: Adagrad with one sum a row."""

    learning_rate: float | None = None
    initial_g2sum: float | None = None
    initial_range: float | None = None
    weight_bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class SparseAdamParameter:
    """Adam of a row."""

    learning_rate: float | None = None
    initial_range: float | None = None
    beta1_decay_rate: float | None = None
    beta2_decay_rate: float | None = None
    ada_epsilon: float | None = None
    weight_bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class SparseNaiveParameter:
    """Plain descent of a row."""

    learning_rate: float | None = None
    initial_range: float | None = None
    weight_bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class SparseCommonSGDRuleParameter:
    """One of several ways to update a row, by name: `adam`, `naive`, `adagrad`."""

    name: str | None = None
    naive: SparseNaiveParameter | None = None
    adagrad: SparseSGDRuleParameter | None = None
    adam: SparseAdamParameter | None = None


@dataclass(frozen=True)
class AdamSGDParameter:
    """How a dense table is updated; `dense_rules` has the formula."""

    learning_rate: float | None = None
    avg_decay_rate: float | None = None
    ada_decay_rate: float | None = None
    ada_epsilon: float | None = None
    mom_decay_rate: float | None = None


@dataclass(frozen=True)
class NaiveSGDParameter:
    """Plain descent of a dense table."""

    learning_rate: float | None = None
    avg_decay_rate: float | None = None


@dataclass(frozen=True)
class SummarySGDParameter:
    """What is pushed is added to what decays: the counts and sums of data_norm."""

    summary_decay_rate: float | None = None


@dataclass(frozen=True)
class DenseSGDRuleParameter:
    """One of several ways to update a dense table, by name: `adam`, `naive`, `summary`."""

    name: str | None = None
    adam: AdamSGDParameter | None = None
    naive: NaiveSGDParameter | None = None
    summary: SummarySGDParameter | None = None


@dataclass(frozen=True)
class DownpourTableAccessorParameter:
    """When a row is kept, saved and dropped, by how often it was shown and clicked."""

    nonclk_coeff: float | None = None
    click_coeff: float | None = None
    base_threshold: float | None = None
    delta_threshold: float | None = None
    delta_keep_days: float | None = None
    delete_after_unseen_days: float | None = None
    ssd_unseenday_threshold: int | None = None
    show_click_decay_rate: float | None = None
    delete_threshold: float | None = None


@dataclass(frozen=True)
class TableAccessorSaveParameter:
    """Through which command a save of one mode is written, and read back."""

    param: int | None = None
    converter: str | None = None
    deconverter: str | None = None


@dataclass(frozen=True)
class TableAccessorParameter:
    """What a table's rows are made of, and how they are updated."""

    accessor_class: str | None = None
    sparse_sgd_param: SparseSGDRuleParameter | None = None
    dense_sgd_param: DenseSGDRuleParameter | None = None
    fea_dim: int | None = None
    embedx_dim: int | None = None
    embedx_threshold: int | None = None
    downpour_accessor_param: DownpourTableAccessorParameter | None = None
    table_accessor_save_param: tuple[TableAccessorSaveParameter, ...] = ()
    sparse_commonsgd_param: SparseCommonSGDRuleParameter | None = None
    embed_sgd_param: SparseCommonSGDRuleParameter | None = None
    embedx_sgd_param: SparseCommonSGDRuleParameter | None = None


@dataclass(frozen=True)
class TableParameter:
    """A table of the servers.

    Attributes:
        type: `PS_SPARSE_TABLE` or `PS_DENSE_TABLE`.
    """

    table_id: int | None = None
    table_class: str | None = None
    shard_num: int | None = None
    accessor: TableAccessorParameter | None = None
    type: str | None = None
    compress_in_save: bool | None = None
    enable_sparse_table_cache: bool | None = None
    sparse_table_cache_rate: float | None = None
    sparse_table_cache_file_num: int | None = None


@dataclass(frozen=True)
class ServerServiceParameter:
    """Which classes of pslib serve, and where; kept, since our own servers serve here."""

    server_class: str | None = None
    client_class: str | None = None
    service_class: str | None = None
    start_server_port: int | None = None
    server_thread_num: int | None = None


@dataclass(frozen=True)
class DownpourServerParameter:
    """All tables of the servers."""

    downpour_table_param: tuple[TableParameter, ...] = ()
    service_param: ServerServiceParameter | None = None


@dataclass(frozen=True)
class ServerParameter:
    """What servers are told."""

    downpour_server_param: DownpourServerParameter | None = None


@dataclass(frozen=True)
class DenseTableParameter:
    """A dense table as workers see it: the parameters that are in it, with their gradients."""

    table_id: int | None = None
    dense_variable_name: tuple[str, ...] = ()
    dense_gradient_variable_name: tuple[str, ...] = ()
    fea_dim: int | None = None


@dataclass(frozen=True)
class SparseTableParameter:
    """A sparse table as workers see it: the ids, the rows and their gradients of each look-up."""

    table_id: int | None = None
    feature_dim: int | None = None
    slot_key: tuple[str, ...] = ()
    slot_value: tuple[str, ...] = ()
    slot_gradient: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramConfig:
    """Which tables a program pulls and pushes."""

    program_id: str | None = None
    push_sparse_table_id: tuple[int, ...] = ()
    push_dense_table_id: tuple[int, ...] = ()
    pull_sparse_table_id: tuple[int, ...] = ()
    pull_dense_table_id: tuple[int, ...] = ()


@dataclass(frozen=True)
class DownpourTrainerParameter:
    """What the workers of one program are told."""

    dense_table: tuple[DenseTableParameter, ...] = ()
    sparse_table: tuple[SparseTableParameter, ...] = ()
    push_sparse_per_batch: int | None = None
    push_dense_per_batch: int | None = None
    skip_op: tuple[str, ...] = ()
    program_config: tuple[ProgramConfig, ...] = ()


@dataclass(frozen=True)
class FsClientParameter:
    """How to reach a file system; kept."""

    uri: str | None = None
    user: str | None = None
    passwd: str | None = None
    hadoop_bin: str | None = None


@dataclass(frozen=True, eq=False)
class PSParameter:
    """A whole Downpour job; two that say the same are two jobs, with tables of their own.

    Attributes:
        trainer_param: of each program, in order; the old API has one for all.
    """

    init_gflags: str | None = None
    server_param: ServerParameter | None = None
    trainer_param: tuple[DownpourTrainerParameter, ...] = ()
    fs_client_param: FsClientParameter | None = None

    def SerializeToString(self) -> bytes:  # noqa: N802  # protocol buffers' name
        """Returns the text form as bytes."""
        return to_text(self).encode()

    @property
    def tables(self) -> tuple[TableParameter, ...]:
        """The tables of the servers."""
        server = self.server_param and self.server_param.downpour_server_param
        return server.downpour_table_param if server else ()
