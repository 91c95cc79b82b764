"""Descriptions of a Downpour job's servers and workers, as plain data.

The fields have pslib's names and numbers, so its text files (`text_format`) and its bytes
(`wire_format`) can be read. None marks an unset field; a repeated field is a tuple.
"""

from dataclasses import dataclass

from jaxfleet.contrib.downpour.wire_format import optional, repeated, to_wire

SPARSE, DENSE = "PS_SPARSE_TABLE", "PS_DENSE_TABLE"


@dataclass(frozen=True)
class SparseSGDRuleParameter:
    """Update of a sparse table's rows: Adagrad with one sum per row."""

    learning_rate: float | None = optional(1, "double")
    initial_g2sum: float | None = optional(2, "double")
    initial_range: float | None = optional(3, "double")
    weight_bounds: tuple[float, ...] = repeated(4, "float")


@dataclass(frozen=True)
class SparseAdamSGDParameter:
    """Adam per row."""

    learning_rate: float | None = optional(1, "double")
    initial_range: float | None = optional(2, "double")
    beta1_decay_rate: float | None = optional(3, "double")
    beta2_decay_rate: float | None = optional(4, "double")
    ada_epsilon: float | None = optional(5, "double")
    weight_bounds: tuple[float, ...] = repeated(6, "float")


@dataclass(frozen=True)
class SparseNaiveSGDRuleParameter:
    """Plain gradient descent per row."""

    learning_rate: float | None = optional(1, "double")
    initial_range: float | None = optional(2, "double")
    weight_bounds: tuple[float, ...] = repeated(3, "float")


@dataclass(frozen=True)
class SparseCommonSGDRuleParameter:
    """Update of a row, selected by name: `adam`, `naive` or `adagrad`."""

    name: str | None = optional(1, "string")
    naive: SparseNaiveSGDRuleParameter | None = optional(2)
    adagrad: SparseSGDRuleParameter | None = optional(3)
    adam: SparseAdamSGDParameter | None = optional(4)


@dataclass(frozen=True)
class AdamSGDParameter:
    """Update of a dense table; `DenseAdam` implements the formula."""

    learning_rate: float | None = optional(1, "double")
    avg_decay_rate: float | None = optional(2, "double")
    ada_decay_rate: float | None = optional(3, "double")
    ada_epsilon: float | None = optional(4, "double")
    mom_decay_rate: float | None = optional(5, "double")


@dataclass(frozen=True)
class NaiveSGDParameter:
    """Plain gradient descent of a dense table."""

    learning_rate: float | None = optional(1, "double")
    avg_decay_rate: float | None = optional(2, "double")


@dataclass(frozen=True)
class SummarySGDParameter:
    """Decayed sum of pushed values: the counts and sums of data_norm."""

    summary_decay_rate: float | None = optional(1, "double")


@dataclass(frozen=True)
class MovingAverageRuleParameter:
    """A moving average of a dense table; parsed only, no table here uses it."""

    momentum: float | None = optional(1, "double")


@dataclass(frozen=True)
class DenseSGDRuleParameter:
    """Update of a dense table, selected by name: `adam`, `naive` or `summary`."""

    name: str | None = optional(1, "string")
    adam: AdamSGDParameter | None = optional(2)
    naive: NaiveSGDParameter | None = optional(3)
    summary: SummarySGDParameter | None = optional(4)
    moving_average: MovingAverageRuleParameter | None = optional(5)


@dataclass(frozen=True)
class DownpourTableAccessorParameter:
    """Thresholds by shows and clicks at which a row is kept, saved and dropped."""

    nonclk_coeff: float | None = optional(1, "float")
    click_coeff: float | None = optional(2, "float")
    base_threshold: float | None = optional(3, "float")
    delta_threshold: float | None = optional(4, "float")
    delta_keep_days: float | None = optional(5, "float")
    delete_after_unseen_days: float | None = optional(8, "float")
    ssd_unseenday_threshold: int | None = optional(9, "int32")
    show_click_decay_rate: float | None = optional(6, "float")
    delete_threshold: float | None = optional(7, "float")


@dataclass(frozen=True)
class TableAccessorSaveParameter:
    """The commands that write and read back a save of one mode."""

    param: int | None = optional(1, "uint32")
    converter: str | None = optional(2, "string")
    deconverter: str | None = optional(3, "string")


@dataclass(frozen=True)
class TableAccessorParameter:
    """Layout of a table's rows and their update rule."""

    accessor_class: str | None = optional(1, "string")
    sparse_sgd_param: SparseSGDRuleParameter | None = optional(2)
    dense_sgd_param: DenseSGDRuleParameter | None = optional(3)
    fea_dim: int | None = optional(4, "uint32")
    embedx_dim: int | None = optional(5, "uint32")
    embedx_threshold: int | None = optional(6, "uint32")
    downpour_accessor_param: DownpourTableAccessorParameter | None = optional(7)
    table_accessor_save_param: tuple[TableAccessorSaveParameter, ...] = repeated(8)
    sparse_commonsgd_param: SparseCommonSGDRuleParameter | None = optional(9)
    embed_sgd_param: SparseCommonSGDRuleParameter | None = optional(10)
    embedx_sgd_param: SparseCommonSGDRuleParameter | None = optional(11)


@dataclass(frozen=True)
class TableParameter:
    """A table of the servers."""

    table_id: int | None = optional(1, "uint64")
    table_class: str | None = optional(2, "string")
    shard_num: int | None = optional(3, "uint64")
    accessor: TableAccessorParameter | None = optional(4)
    type: str | None = optional(5, "enum", (SPARSE, DENSE))  # `PS_SPARSE_TABLE` or `PS_DENSE_TABLE`
    compress_in_save: bool | None = optional(6, "bool")
    enable_sparse_table_cache: bool | None = optional(7, "bool")
    sparse_table_cache_rate: float | None = optional(8, "double")
    sparse_table_cache_file_num: int | None = optional(9, "uint32")


@dataclass(frozen=True)
class ServerServiceParameter:
    """pslib's server classes and addresses; parsed only, jaxfleet runs its own servers."""

    server_class: str | None = optional(1, "string")
    client_class: str | None = optional(2, "string")
    service_class: str | None = optional(3, "string")
    start_server_port: int | None = optional(4, "uint32")
    server_thread_num: int | None = optional(5, "uint32")


@dataclass(frozen=True)
class DownpourServerParameter:
    """All tables of the servers."""

    downpour_table_param: tuple[TableParameter, ...] = repeated(1)
    service_param: ServerServiceParameter | None = optional(2)


@dataclass(frozen=True)
class ServerParameter:
    """Configuration of the servers."""

    downpour_server_param: DownpourServerParameter | None = optional(1)


@dataclass(frozen=True)
class DownpourWorkerParameter:
    """Tables as pslib's workers see them; parsed only."""

    downpour_table_param: tuple[TableParameter, ...] = repeated(1)


@dataclass(frozen=True)
class WorkerParameter:
    """Configuration of pslib's workers; parsed only."""

    downpour_worker_param: DownpourWorkerParameter | None = optional(1)


@dataclass(frozen=True)
class DenseTableParameter:
    """A dense table as workers see it: its parameters with their gradients."""

    table_id: int | None = optional(1, "int32")
    dense_variable_name: tuple[str, ...] = repeated(2, "string")
    dense_gradient_variable_name: tuple[str, ...] = repeated(3, "string")
    fea_dim: int | None = optional(4, "int32")


@dataclass(frozen=True)
class SparseTableParameter:
    """A sparse table as workers see it: ids, rows and row gradients of each look-up."""

    table_id: int | None = optional(1, "int32")
    feature_dim: int | None = optional(2, "int32")
    slot_key: tuple[str, ...] = repeated(3, "string")
    slot_value: tuple[str, ...] = repeated(4, "string")
    slot_gradient: tuple[str, ...] = repeated(5, "string")


@dataclass(frozen=True)
class ProgramConfig:
    """The tables that a program pulls and pushes."""

    program_id: str | None = optional(1, "string", required=True)
    push_sparse_table_id: tuple[int, ...] = repeated(2, "int32")
    push_dense_table_id: tuple[int, ...] = repeated(3, "int32")
    pull_sparse_table_id: tuple[int, ...] = repeated(4, "int32")
    pull_dense_table_id: tuple[int, ...] = repeated(5, "int32")


@dataclass(frozen=True)
class DownpourTrainerParameter:
    """Configuration of the workers of one program."""

    dense_table: tuple[DenseTableParameter, ...] = repeated(1)
    sparse_table: tuple[SparseTableParameter, ...] = repeated(2)
    push_sparse_per_batch: int | None = optional(3, "int32")
    push_dense_per_batch: int | None = optional(4, "int32")
    skip_op: tuple[str, ...] = repeated(5, "string")
    program_config: tuple[ProgramConfig, ...] = repeated(6)


@dataclass(frozen=True)
class FsClientParameter:
    """How to reach a file system; parsed only."""

    uri: str | None = optional(2, "string")
    user: str | None = optional(3, "string")
    passwd: str | None = optional(4, "string")
    hadoop_bin: str | None = optional(51, "string")
    fs_type: str | None = optional(1, "enum", ("HDFS", "AFS"))
    buffer_size: int | None = optional(5, "int32")
    afs_conf: str | None = optional(101, "string")


@dataclass(frozen=True, eq=False)
class PSParameter:
    """A whole Downpour job; compared by identity, since each job has its own tables.

    Attributes:
        trainer_param: one per program, in order; the older API has a single one for all.
        worker_class: parsed only, as are the two fields after it.
    """

    init_gflags: str | None = optional(4, "string")
    server_param: ServerParameter | None = optional(102)
    trainer_param: tuple[DownpourTrainerParameter, ...] = repeated(301)
    fs_client_param: FsClientParameter | None = optional(501)
    worker_class: str | None = optional(1, "string")
    server_class: str | None = optional(2, "string")
    instance_class: str | None = optional(3, "string")
    worker_param: WorkerParameter | None = optional(101)

    def SerializeToString(self) -> bytes:  # noqa: N802  # protocol buffers' name
        """Encodes the description in the protocol-buffer wire format."""
        return to_wire(self)

    @property
    def tables(self) -> tuple[TableParameter, ...]:
        server = self.server_param and self.server_param.downpour_server_param
        return server.downpour_table_param if server else ()
