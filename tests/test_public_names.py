"""Every name that a user may import from a package; a change of the list belongs in this file."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import jaxfleet

PUBLIC = {
    "jaxfleet": """
        Captured DistributedStrategy Executor Scope Step TrainingStep Twin capture
        distribute distributed_optimizer embedding_table emulate_devices initialize is_first
        memory_optimize rank release_memory size split_files verify
    """,
    "jaxfleet.analysis": "",
    "jaxfleet.analysis.memory": """
        Chain cost_of ExecutableCuts LiveRange memory_profile MemoryProfile offload_plans
        OffloadPlan peak_of plan_for RecomputePlan schedule_constraints ScheduleConstraints
        smallest_budget stages_of uniform_plans
    """,
    "jaxfleet.analysis.optimizer_groups": """
        cut_rows find_optimizer_groups OptimizerGroup OptimizerGroups Reason RowLocality
        split_branches
    """,
    "jaxfleet.analysis.placement": "",
    "jaxfleet.analysis.sharding": """
        BlockPlan Mesh mesh_of OperatorSharding OperatorView OpPlan own_state propagate
        REPLICATED SCATTER sharded Sharding ShardingKind ShardingPlan StateSharding SUM
        summed_state VARYING
    """,
    "jaxfleet.board": """
        Event EventDetector History Series Watch check_host check_libraries page_token serve_board
    """,
    "jaxfleet.capture": """
        Captured EmbeddingTable Leaf Signature capture distributed_optimizer embedding_table
    """,
    "jaxfleet.capture.embedding": "",
    "jaxfleet.checkpoint": """
        Checkpoint CheckpointSeries PartReceipt Piece commit discard is_disk_full
        open_checkpoint position_facts read_position save_arrays save_pieces write_part
    """,
    "jaxfleet.checkpoint.tables": """
        SavedTable TableSeries compact export_arrays export_text load_tables save_tables
        saved_tables table_pieces
    """,
    "jaxfleet.cli": """
        main
    """,
    "jaxfleet.compat": """
        install uninstall
    """,
    "jaxfleet.contrib": "",
    "jaxfleet.contrib.downpour": """
        DownpourJob DownpourSGD DownpourServer DownpourWorker PSParameter from_text to_text
    """,
    "jaxfleet.contrib.downpour.pslib": """
        DistributedAdam DownpourOptimizer DownpourServer DownpourWorker PSLib fleet fleet_embedding
    """,
    "jaxfleet.data": """
        Batches Loader
    """,
    "jaxfleet.env": """
        CloudNodes cluster_environment compiled_code_environment dumping_to ensure_cpu_num
        ended_file enter_environment Environment has_job_ended is_private JobName MOVING
        periodic_saves_environment PeriodicSaves prepend_python_path preset_flag PserverRole
        Rank rank_environment read_cache_dir read_check_nan_inf read_cloud_nodes read_cluster
        read_cpu_num read_environment read_job read_meeting_dir read_metrics_host read_metrics_port
        read_periodic_saves read_rank read_restart read_roles read_rpc_deadline_ms
        read_selected_gpus read_shows_progress read_started read_trace_dir read_visible_gpus
        rpc_threads runtime_dir SaveInterval says_how_many_cpu_devices Started wants_gpus
    """,
    "jaxfleet.fleet": """
        FleetBase JobFleet OnlyWorker all_reduce_worker barrier_worker distribute
        distributed_optimizer init is_first_worker is_server is_worker restore run_server
        save server_endpoints server_index server_num split_files stop_worker
        worker_endpoints worker_index worker_num
    """,
    "jaxfleet.cluster.rendezvous": """
        FileRendezvous Folder FsPath GroupName GroupRendezvous NetworkRendezvous reduce_into
        Rendezvous Roster SingleProcess
    """,
    "jaxfleet.cluster.roles": """
        ClusterRoleMaker GeneralRoleMaker K8SRoleMaker MPICollectiveRoleMaker MPIRoleMaker
        MPISymetricRoleMaker PaddleCloudRoleMaker Role RoleMakerBase
        UserDefinedCollectiveRoleMaker UserDefinedRoleMaker
    """,
    "jaxfleet.fluid": """
        Block BuildStrategy CPUPlace CUDAPlace CompiledProgram DataFeeder DatasetFactory
        DistributeTranspiler DistributeTranspilerConfig ExecutionStrategy Executor
        FLDistributeTranspiler FetchHandler InMemoryDataset LoDTensor Operator ParallelExecutor
        ParamAttr Parameter Program QueueDataset Scope Variable append_backward cpu_places
        create_lod_tensor create_random_int_lodtensor cuda_places data default_main_program
        default_startup_program device_guard embedding get_flags global_scope gradients
        is_compiled_with_cuda load memory_optimize name_scope one_hot program_guard
        release_memory save scope_guard set_flags
    """,
    "jaxfleet.fluid.compiler": """
        BuildStrategy CompiledProgram ExecutionStrategy Graph
    """,
    "jaxfleet.fluid.contrib": """
        memory_usage
    """,
    "jaxfleet.fluid.dataset": """
        CoreDataset DatasetBase DatasetFactory FileInstantDataset InMemoryDataset QueueDataset
    """,
    "jaxfleet.fluid.distributed": """
        DownpourJob DownpourSGD DownpourServer DownpourWorker PSParameter from_text to_text
    """,
    "jaxfleet.fluid.executor": """
        Executor FetchHandler Scope as_numpy global_scope scope_guard
    """,
    "jaxfleet.fluid.framework": """
        Block CPUPlace CUDAPlace OpProtoHolder Operator Parameter Program Variable cpu_places
        cuda_places default_main_program default_startup_program device_guard
        generate_control_dev_var_name get_flags grad_var_name in_dygraph_mode
        is_compiled_with_cuda name_scope program_guard set_flags switch_main_program
        switch_startup_program
    """,
    "jaxfleet.fluid.incubate": "",
    "jaxfleet.fluid.incubate.fleet": "",
    "jaxfleet.fluid.incubate.fleet.base": "",
    "jaxfleet.fluid.incubate.fleet.collective": """
        Collective CollectiveOptimizer DistFCConfig DistributedStrategy LambConfig TrainStatus
        fleet
    """,
    "jaxfleet.fluid.incubate.fleet.utils": "",
    "jaxfleet.fluid.incubate.fleet.parameter_server": "",
    "jaxfleet.fluid.incubate.fleet.parameter_server.distribute_transpiler": """
        DistributedTranspiler TranspilerOptimizer fleet
    """,
    "jaxfleet.fluid.incubate.fleet.parameter_server.pslib": """
        DistributedAdam DownpourOptimizer DownpourServer DownpourWorker PSLib fleet fleet_embedding
    """,
    "jaxfleet.fluid.io": """
        DataLoader PyReader batch buffered cache chain compose firstn
        get_program_parameter get_program_persistable_vars
        is_belong_to_optimizer is_parameter is_persistable load load_inference_model load_params
        load_persistables load_program_state load_vars map_readers save save_inference_model
        save_params save_persistables save_vars set_program_state shuffle
    """,
    "jaxfleet.fluid.layers": """
        DynamicRNN IfElse Print StaticRNN Switch While abs accuracy acos adaptive_pool2d argmax
        argmin argsort array_length array_read array_write asin assign atan auc
        autoincreased_step_counter batch_norm beam_search beam_search_decode brelu case cast
        ceil clip clip_by_norm concat cond conv2d conv2d_transpose conv3d cos cos_sim cosh
        cosine_decay create_array create_global_var create_parameter create_py_reader_by_data
        create_tensor crf_decoding cross_entropy cumsum data data_norm double_buffer dropout
        dynamic_gru dynamic_lstm edit_distance elementwise_add elementwise_div
        elementwise_floordiv elementwise_max elementwise_min elementwise_mod elementwise_mul
        elementwise_pow elementwise_sub elu embedding equal erf exp expand exponential_decay fc
        fill_constant fill_constant_batch_size_like flatten floor gather gather_nd
        gaussian_random gelu greater_equal greater_than group_norm hard_shrink hard_sigmoid
        hard_swish hsigmoid huber_loss image_resize image_resize_short increment
        inverse_time_decay is_empty l2_normalize label_smooth layer_norm leaky_relu less_equal
        less_than linear_chain_crf linear_lr_warmup log log_loss logical_and logical_not
        lod_reset logical_or logical_xor logsigmoid matmul mean mse_loss mul natural_exp_decay nce
        noam_decay not_equal one_hot ones ones_like pad piecewise_decay polynomial_decay pool2d
        pool3d pow py_func py_reader read_file reciprocal reduce_all reduce_any reduce_max
        reduce_mean reduce_min reduce_prod reduce_sum relu relu6 reorder_lod_tensor_by_rank reshape
        resize_bilinear
        resize_nearest resize_trilinear reverse round rsqrt sampled_softmax_with_cross_entropy
        scale scatter selu sequence_concat sequence_conv sequence_expand sequence_first_step
        sequence_last_step sequence_pad sequence_pool sequence_reshape sequence_slice
        sequence_softmax sequence_unpad shape sigmoid sigmoid_cross_entropy_with_logits sign sin
        sinh slice soft_relu softmax softmax_with_cross_entropy softplus softshrink softsign
        split sqrt square square_error_cost squeeze stack stanh strided_slice sum sums swish
        switch_case tanh tanh_shrink thresholded_relu topk transpose uniform_random unsqueeze
        unstack warpctc while_loop zeros zeros_like
    """,
    "jaxfleet.fluid.lowering": "",
    "jaxfleet.fluid.optimizer": """
        Accumulator Adadelta AdadeltaOptimizer Adagrad AdagradOptimizer Adam AdamOptimizer
        Adamax AdamaxOptimizer DGCMomentumOptimizer DecayedAdagrad DecayedAdagradOptimizer
        Dpsgd DpsgdOptimizer ExponentialMovingAverage Ftrl FtrlOptimizer Lamb LambOptimizer
        LarsMomentum LarsMomentumOptimizer LookaheadOptimizer ModelAverage Momentum
        MomentumOptimizer Optimizer PipelineOptimizer RMSProp RMSPropOptimizer
        RecomputeOptimizer SGD SGDOptimizer
    """,
    "jaxfleet.fluid.pserver": """
        PserverRuns TABLES begins_rows refuse_several_devices talks_to_others why_not
    """,
    "jaxfleet.fluid.transpiler": """
        DistributeTranspiler DistributeTranspilerConfig DistributedMode FLDistributeTranspiler
        GeoSgdTranspiler HashName PSDispatcher RoundRobin ServerRuntimeConfig VarBlock
        memory_optimize release_memory same_or_split_var slice_variable wait_server_ready
    """,
    "jaxfleet.fluid.transpiler.details": """
        UnionFind VarDistributed VarStruct VarsDistributed block_to_code delete_ops
        find_op_by_input_arg find_op_by_output_arg op_to_code program_to_code variable_to_code
        wait_server_ready
    """,
    "jaxfleet.cluster": """
        check_has_joined has_started initialize is_first joined not_joined ProcessGroup rank
        RankPlace size split_files
    """,
    "jaxfleet.ir": """
        Attr Attrs Block BlockRef Constant Dim Finding Frame Kind Literal Operand Operands Operator
        OpTraits Program ProgramDiff Role Rule Size Source Struct Variable Word block_name block_of
        canonical diff equivalent evaluate grad_name ir_traits letter load_program make_constant
        parse parse_all parse_size print_folded print_operator print_program save_program shape_of
        trainer_name unified_diff verify with_values
    """,
    "jaxfleet.launch": """
        CollectiveJob Job Nodes PORT_TAKEN launch launch_ranks
    """,
    "jaxfleet.launch.engines": """
        any_machines Batch batch_script Request Resources submit
    """,
    "jaxfleet.lower": """
        all_to_device AXIS bind_sizes compute_in_place cut_axes device_count device_mesh
        ExecutableCache host_type HostType inputs_of Interface is_key Layout lower_block
        lower_step LoweredBlock LoweredStep OnOne ParallelFunction ProgramFunction shardings
        Shares StagedRanks StagedStep to_device to_host with_shard_map
    """,
    "jaxfleet.ops": """
        Array Context Dialect Interpreter Meaning OpDef find_op known_ops register_dialect
        register_op
    """,
    "jaxfleet.ops.fluid": """
        EMPTY GRAD Gradient LAZY_ROWS RANDOM_OPS RUN_SLOT Schema Slot schema_of UNWANTED
    """,
    "jaxfleet.passes": """
        AmpByRole BroadcastParams ClipOnTrainers CommInit CommInitAll CompressSends
        CutApart DataParallel DcAsgd DeadCodeElimination DealRings Dispatch Donate
        ExchangeAllreduce FlAverage FuseAllreduce GenNcclId GeoSgd GradAllreduce
        GradAllreduceByRole HalfPrecision InsertSendRecv InsertStartup InterleaveSlices
        LocalSGD Meet MemoryOptimize MergeGradients MergeSends MultiBatchMerge Offload
        OrderForMemory PrefetchRows Recompute ReleaseMemory ScanSlices
        ScheduleSends ShapeReads ShardedUpdate SkipNonfinite SkipOverflow SliceVar
        SnapshotParams SparseTable StrideSlices TrainApart TurnProducts TwoLevels
        UpdateOnTrainers
    """,
    "jaxfleet.passes.collective": "",
    "jaxfleet.passes.fluid": "",
    "jaxfleet.passes.memory": "",
    "jaxfleet.passes.precision": "",
    "jaxfleet.passes.pserver": "",
    "jaxfleet.pipeline": """
        Dump FACTS FRAMES Instrument Option Pass Record SOURCES Stage Statistics Timing communicates
        dump_folders load_plugins made_by make_pass new_dump_folder options_of parse_pipeline
        pass_text pipeline_text read_beside read_index register_pass registered_passes remove_dumps
        run_pipeline table write_facts
    """,
    "jaxfleet.ps": "",
    "jaxfleet.ps.client": "",
    "jaxfleet.ps.server": """
        Server ServerCore ServerOptions
    """,
    "jaxfleet.report": """
        build_report History Measured of_program of_record read_folders render Report StageRecord
        TimePart write_report
    """,
    "jaxfleet.runtime": """
        DistributedStrategy Executor Handle Scope ServerStep Step TrainerStep TrainingStep Twin
        distribute emulate_devices memory_optimize release_memory verify
    """,
    "jaxfleet.tables": """
        Adagrad Adam AfterCount ByChance ByScore Capacity Constant DownpourAdagrad DownpourAdam
        Momentum Normal Rmsprop RowBatch RowKeeper Sgd Summary TableSpec TableStore
        TieredStore Uniform Unseen
        make_store
    """,
    "jaxfleet.testing": """
        check_pass docstring_programs
    """,
    "jaxfleet.testing.simulation": """
        Failure Schedule check draw_schedule explore shrink
    """,
    "jaxfleet.transport": "",
    "jaxfleet.transport.zmq": "",
    "jaxfleet.observability": """
        Board FileSpans LongWait NO_SPANS Progress Sample Spans StepSpans StepTimes
        merge notify printable read_token resident_bytes scrape spans_of write_token
    """,
}


def names_of(package: ModuleType) -> set[str]:
    """Returns a package's public names other than its modules."""
    found = ((name, getattr(package, name)) for name in dir(package))
    return {
        name
        for name, value in found
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def test_the_public_names_are_these() -> None:
    walked = pkgutil.walk_packages(jaxfleet.__path__, "jaxfleet.")
    packages = ["jaxfleet", *(module.name for module in walked if module.ispkg)]
    found = {name: names_of(importlib.import_module(name)) for name in packages}
    assert found == {name: set(names.split()) for name, names in PUBLIC.items()}


def test_names_that_are_imported_when_asked_for_are_those_that_type_checkers_see() -> None:
    (tree,) = (ast.parse(Path(path, "__init__.py").read_text()) for path in jaxfleet.__path__)
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom) and node.module != "jaxfleet"
        for alias in node.names
    }
    assert seen == jaxfleet._HOME_OF  # noqa: SLF001


@pytest.mark.grid
def test_a_name_of_the_package_is_its_public_one_whatever_was_imported_first() -> None:
    asked = (
        "import jaxfleet.capture.trace_equivalence, jaxfleet as jf\n"
        "print(jf.capture.__name__, jf.passes.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["capture", "jaxfleet.passes"]


def test_the_command_line_imports_no_jax_for_what_needs_none() -> None:
    asked = (
        "import sys; from jaxfleet.cli import main\n"
        "commands = 'launch', 'scale', 'serve', 'top', 'timeline', 'opt', 'diff', 'passes'\n"
        "for command in ([], *([name] for name in commands)):\n"
        "    try: main([*command, '--help'])\n"
        "    except SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True, timeout=60)


ALONE = """\
import sys
import jax.numpy as jnp
import jaxfleet as jf

example = jnp.float32(1), jnp.ones((4, 3))
jf.distribute(lambda state, batch: (state + batch.sum(), ()), example, "single")(*example)
sys.exit(" ".join(name for name in sys.modules if name.startswith("jaxfleet.ps")) or None)
"""


def test_a_step_on_one_device_imports_nothing_of_servers() -> None:
    subprocess.run([sys.executable, "-c", ALONE], capture_output=True, check=True, timeout=60)
