"""Cases of fluid's own tests on trainer and server programs; `peer_cases.md` lists them."""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from jaxfleet import fluid
from tests.fluid.nets import fresh

A, B = "127.0.0.1:6174", "127.0.0.1:6175"
FORWARD = [
    "mul",
    "elementwise_add",
    "elementwise_sub",
    "square",
    "mean",
    "fill_constant",
    "mean_grad",
    "square_grad",
    "elementwise_sub_grad",
    "elementwise_add_grad",
]
Minimize = Callable[[], Any]


def sgd() -> Any:
    return fluid.optimizer.SGD(0.1)


class Job:
    """The standard net of these cases, transpiled."""

    def __init__(
        self,
        *,
        optimizer: Minimize = sgd,
        endpoints: tuple[str, ...] = (A, B),
        trainer_id: int = 0,
        trainers: int = 2,
        sync_mode: bool = True,
        seed: int = 0,
        param_attr: Any = None,
        **config: Any,
    ) -> None:
        chosen = fluid.DistributeTranspilerConfig()
        chosen.wait_port = False
        if not sync_mode and config:
            chosen.sync_mode = False
        for name, value in config.items():
            setattr(chosen, name, value)
        self.transpiler = fluid.DistributeTranspiler(chosen)
        with fresh() as (self.main, self.startup):
            self.main.random_seed = seed
            loss = net(param_attr)
            optimizer().minimize(loss)
            self.transpiler.transpile(
                trainer_id, pservers=",".join(endpoints), trainers=trainers, sync_mode=sync_mode
            )
        self.trainer = self.transpiler.get_trainer_program()

    def server(self, endpoint: str) -> fluid.Program:
        return self.transpiler.get_pserver_program(endpoint)

    def begun(self, endpoint: str) -> fluid.Program:
        return self.transpiler.get_startup_program(endpoint)


def net(param_attr: Any = None) -> fluid.Variable:
    x, y = fluid.layers.data("x", [1000]), fluid.layers.data("y", [1000])
    attr = param_attr or fluid.ParamAttr(name="fc_w")
    out = fluid.layers.fc(x, 1000, param_attr=attr, bias_attr=fluid.ParamAttr(name="fc_b"))
    return fluid.layers.mean(fluid.layers.square_error_cost(out, y))


def types(program: fluid.Program, block: int = 0) -> list[str]:
    return [op.type for op in program.block(block).ops]


def all_types(program: fluid.Program) -> list[list[str]]:
    return [types(program, block.idx) for block in program.blocks]


def only(program: fluid.Program, op_type: str) -> list[Any]:
    return [op for op in program.global_block().ops if op.type == op_type]


def params_of(job: Job, *endpoints: str) -> list[list[str]]:
    return [sorted(p.name for p in job.server(ep).all_parameters()) for ep in endpoints]


def test_a_trainer_sends_gradients_and_receives_parameters() -> None:
    wanted = [*FORWARD, "send", "mul_grad", "split_byref", "send", "send_barrier"]
    wanted += ["recv", "recv", "fetch_barrier", "concat"]
    assert types(Job().trainer) == wanted


def test_a_trainers_startup_receives_what_servers_initialize() -> None:
    """Fluid before 1.7 kept the learning rate there too."""
    job = Job()
    job.server(A), job.begun(A)
    wanted = ["fill_constant", "uniform_random", "recv", "recv", "fetch_barrier", "concat"]
    assert types(job.startup) == wanted
    names = set(job.startup.global_block().vars)
    assert {"fc_w.block0", "fc_w.block1", "fc_w", "fc_b"} <= names
    assert names.isdisjoint({"fc_w@GRAD", "fc_b@GRAD", "learning_rate_0"})


def test_a_server_has_a_block_per_update() -> None:
    job = Job()
    update = ["sum", "scale", "sgd"]
    first, second = job.server(A), job.server(B)
    assert all_types(first) == [["listen_and_serv"], update, update]
    assert [block.parent_idx for block in first.blocks] == [-1, 0, 0]
    assert all_types(second) == [["listen_and_serv"], update]
    (serve,) = second.global_block().ops
    assert serve.input("X") == ["fc_w@GRAD.block0.trainer_0", "fc_w@GRAD.block0.trainer_1"]
    assert serve.attr("pserver_id") == 1


def test_every_parameter_is_optimized_once() -> None:
    job = Job()
    updated = []
    for endpoint in (A, B):
        for block in job.server(endpoint).blocks[1:]:
            updated += [op.input("Param")[0] for op in block.ops if op.type == "sgd"]
    assert sorted(updated) == ["fc_b", "fc_w.block0", "fc_w.block1"]


def test_round_robin_places_slices_and_whole_parameters() -> None:
    assert params_of(Job(), A, B) == [["fc_b", "fc_w.block1"], ["fc_w.block0"]]


def test_sends_carry_endpoints_roles_and_sections() -> None:
    first, second = only(Job().trainer, "send")
    assert first.input("X") == ["fc_b@GRAD.trainer_0"]
    assert (first.attr("epmap"), first.attr("op_role")) == ([A], 4)
    assert first.attr("op_role_var") == ["fc_b", "fc_b@GRAD.trainer_0"]
    assert second.input("X") == ["fc_w@GRAD.block0.trainer_0", "fc_w@GRAD.block1.trainer_0"]
    assert second.attr("epmap") == [B, A]
    assert second.attr("op_role_var") == ["fc_w", "fc_w@GRAD"]
    assert second.attr("sections") is None
    assert second.attr("send_varnames") is None
    (cut,) = only(Job().trainer, "split_byref")
    assert (cut.attr("sections"), cut.attr("op_role")) == ([500, 500], 8)


def test_the_maker_of_a_renamed_gradient_keeps_its_role_var() -> None:
    (made,) = only(Job().trainer, "elementwise_add_grad")
    assert "fc_b@GRAD.trainer_0" in made.output_arg_names
    assert made.attr("op_role_var") == ["fc_b", "fc_b@GRAD"]


def test_listen_and_serv_carries_fanin_mode_and_blocks() -> None:
    (serve,) = Job().server(A).global_block().ops
    buffers = [f"fc_b@GRAD.trainer_{t}" for t in (0, 1)]
    buffers += [f"fc_w@GRAD.block1.trainer_{t}" for t in (0, 1)]
    assert serve.input("X") == buffers
    assert (serve.attr("Fanin"), serve.attr("pserver_id")) == (2, 0)
    assert serve.attr("distributed_mode") == fluid.transpiler.DistributedMode.SYNC
    assert [block.idx for block in serve.attr("optimize_blocks")] == [1, 2]
    assert sorted(serve.attr("grad_to_block_id")) == ["fc_b@GRAD:1", "fc_w@GRAD.block1:2"]
    assert serve.attr("lr_decay_block_id") == -1
    assert {serve.attr(f"rpc_{x}_thread_num") for x in ("get", "send", "prefetch")} == {12}


def test_an_update_block_sums_averages_and_applies() -> None:
    total, mean, update = Job().server(A).block(1).ops
    assert total.input("X") == ["fc_b@GRAD.trainer_0", "fc_b@GRAD.trainer_1"]
    assert total.output("Out") == mean.input("X") == mean.output("Out") == ["fc_b@GRAD"]
    assert mean.attr("scale") == 0.5
    assert update.input("Param") == ["fc_b"]
    assert update.attr("op_role") == 2
    assert update.attr("op_role_var") == ["fc_b", "fc_b@GRAD"]


def test_parameters_and_merged_gradients_persist_on_servers() -> None:
    variables = Job().server(A).global_block().vars
    kept = {name for name, v in variables.items() if v.persistable}
    assert {"fc_b", "fc_w.block1", "fc_b@GRAD", "fc_w@GRAD.block1"} <= kept
    assert not any(".trainer_" in name for name in kept)


def test_a_servers_startup_leaves_the_trainers_initializers_alone() -> None:
    """Fluid changed the shape of the trainer's initializer to the server's."""
    job = Job()
    job.begun(A), job.begun(B)
    (begins,) = only(job.startup, "uniform_random")
    assert begins.attr("shape") == [1000, 1000]
    (part,) = only(job.begun(A), "uniform_random")
    assert part.attr("shape") == [500, 1000]


def test_a_large_min_block_size_leaves_parameters_whole() -> None:
    job = Job(min_block_size=1048576)
    wanted = [*FORWARD, "send", "mul_grad", "send", "send_barrier", "recv", "recv", "fetch_barrier"]
    assert types(job.trainer) == wanted
    assert all_types(job.server(A)) == [["listen_and_serv"], ["sum", "scale", "sgd"]]
    assert types(job.begun(A)) == ["fill_constant", "fill_constant"]
    assert job.server(B).global_block().var("fc_w").shape == (1000, 1000)


def test_without_slicing_whole_parameters_are_dispatched() -> None:
    job = Job(slice_var_up=False)
    assert params_of(job, A, B) == [["fc_w"], ["fc_b"]]
    assert job.server(A).global_block().var("fc_w").shape == (1000, 1000)


def test_four_servers_share_a_parameter_in_four_slices() -> None:
    endpoints = tuple(f"{x}:1" for x in "abcd")
    job = Job(endpoints=endpoints)
    held = [["fc_b", "fc_w.block3"], ["fc_w.block0"], ["fc_w.block1"], ["fc_w.block2"]]
    assert params_of(job, *endpoints) == held
    assert job.server("b:1").global_block().var("fc_w.block0").shape == (250, 1000)


def test_one_server_has_every_parameter_whole() -> None:
    server = Job(endpoints=("h:1",)).server("h:1")
    (serve,) = server.global_block().ops
    buffers = [f"{g}@GRAD.trainer_{t}" for g in ("fc_b", "fc_w") for t in (0, 1)]
    assert serve.input("X") == buffers
    assert server.num_blocks == 3


def test_the_last_of_three_trainers_sends_under_its_own_suffix() -> None:
    job = Job(trainer_id=2, trainers=3)
    first, second = only(job.trainer, "send")
    assert first.input("X") == ["fc_b@GRAD.trainer_2"]
    assert second.input("X") == [f"fc_w@GRAD.block{i}.trainer_2" for i in (0, 1)]
    (serve,) = job.server(B).global_block().ops
    assert serve.input("X") == [f"fc_w@GRAD.block0.trainer_{t}" for t in range(3)]
    assert job.server(B).block(1).ops[1].attr("scale") == pytest.approx(1 / 3)
    assert serve.attr("Fanin") == 3
    assert job.trainer._is_chief is False


def test_one_trainer_sends_without_a_suffix() -> None:
    """As in 1.8, the trainer's names have no suffix but the server's do.

    jaxfleet's still runs, since a server knows the sender of a message.
    """
    job = Job(trainers=1)
    first, second = only(job.trainer, "send")
    assert first.input("X") == ["fc_b@GRAD"]
    assert second.input("X") == ["fc_w@GRAD.block0", "fc_w@GRAD.block1"]
    server = job.server(A)
    (serve,) = server.global_block().ops
    assert serve.input("X") == ["fc_b@GRAD.trainer_0", "fc_w@GRAD.block1.trainer_0"]
    assert serve.attr("Fanin") == 1
    assert server.block(1).ops[1].attr("scale") == 1.0


def test_a_trainer_program_records_its_endpoints_and_chief() -> None:
    program = Job().trainer
    assert program._is_distributed is True
    assert program._is_chief is True
    assert program._endpoints == [A, B]
    assert program._ps_endpoint == "127.0.0.1:6174"
    assert program._distributed_lookup_table is None


def test_get_trainer_program_returns_the_same_program_twice() -> None:
    job = Job()
    before = str(job.trainer)
    assert job.transpiler.get_trainer_program() is job.main is job.trainer
    assert str(job.trainer) == before


def test_an_unknown_server_endpoint_is_refused() -> None:
    with pytest.raises(KeyError, match="no server 'x:1'"):
        Job().server("x:1")
    with pytest.raises(KeyError, match="no server 'x:1'"):
        Job().begun("x:1")


def test_an_unknown_mode_is_refused() -> None:
    """Fluid treated any other value as `pserver`."""
    with pytest.raises(ValueError, match=r"config\.mode is 'bogus'"):
        Job(mode="bogus")


def test_a_server_without_parameters_has_one_empty_block() -> None:
    config = fluid.DistributeTranspilerConfig()
    config.slice_var_up, config.wait_port = False, False
    transpiler = fluid.DistributeTranspiler(config)
    with fresh():
        x = fluid.layers.data("x", [1000])
        out = fluid.layers.fc(x, 1000, param_attr=fluid.ParamAttr(name="fc_w"), bias_attr=False)
        sgd().minimize(fluid.layers.mean(out))
        transpiler.transpile(0, pservers=f"{A},{B}", trainers=2)
    program = transpiler.get_pserver_program(B)
    assert all_types(program) == [["listen_and_serv"], []]


def test_the_registry_of_slices_adds_up_to_the_parameters() -> None:
    job = Job(optimizer=lambda: fluid.optimizer.RMSProp(0.1))
    registry: Any = job.trainer._parameters_on_pservers
    here = registry.get_distributed_vars_by_ep(A)
    assert {v.origin.name for v in here} >= {"fc_w", "fc_b", "fc_w_momentum_0"}
    for var in here:
        numel = [prod(x.shape) for x in (var.slice, var.origin)]
        if var.is_slice:
            other = registry.get_distributed_var_by_origin_and_ep(var.origin.name, B)
            assert numel[0] + prod(other.slice.shape) == numel[1]
        else:
            assert numel[0] == numel[1]
    weights = registry.get_distributed_var_by_slice("fc_w.block1")
    assert (weights.offset, weights.block_id, weights.vtype) == (500000, 1, "Param")
    grouped = registry.get_distributed_vars_by_vtypes(["Param"], groupby=True)
    assert [len(grouped[name]) for name in ("fc_b", "fc_w")] == [1, 2]
    assert "500000" in registry.overview()


def test_server_updates_follow_the_schedule_block() -> None:
    """The operators are those of fluid 1.8."""
    job = Job(
        optimizer=lambda: fluid.optimizer.SGD(fluid.layers.exponential_decay(1.0, 2100, 0.1, True))
    )
    server = job.server(A)
    schedule = ["increment", "cast", "scale", "floor", "fill_constant", "elementwise_pow", "scale"]
    assert types(server, 1) == schedule
    assert [block.parent_idx for block in server.blocks] == [-1, 0, 1, 1]
    (serve,) = server.global_block().ops
    assert [block.idx for block in serve.attr("optimize_blocks")] == [1, 2, 3]
    assert serve.attr("lr_decay_block_id") == 1


def test_servers_apply_decay_and_a_piecewise_rate() -> None:
    def momentum() -> Any:
        rate = fluid.layers.piecewise_decay([1, 10, 20, 30], [1.0, 0.5, 0.25, 0.1, 0.01])
        decay = fluid.regularizer.L2Decay(1e-4)
        return fluid.optimizer.Momentum(rate, 0.9, regularization=decay)

    server = Job(optimizer=momentum).server(A)
    made = all_types(server)
    assert len(made) == 9
    assert made[7] == made[8] == ["sum", "scale", "scale", "sum", "momentum"]
    assert made[1][-2:] == ["fill_constant", "conditional_block"]
    assert len(made[1]) == 30


def clipped_and_decayed() -> dict[str, Any]:
    """Returns a job in which only `fc_w` is clipped the old way, and decays."""

    def optimizer() -> Any:
        fluid.clip.set_gradient_clip(fluid.clip.GradientClipByValue(0.1), ["fc_w"])
        return fluid.optimizer.SGD(0.1)

    decay = fluid.regularizer.L2Decay(0.1)
    return {"optimizer": optimizer, "param_attr": fluid.ParamAttr("fc_w", regularizer=decay)}


def test_a_clip_applies_only_to_its_declared_parameters() -> None:
    """Up to 1.6 servers used the last parameter's for all, on each slice by itself."""
    job = Job(**clipped_and_decayed())
    (clip,) = only(job.trainer, "clip")
    assert clip.input("X") == ["fc_w@GRAD"]
    assert not any("clip" in kinds for ep in (A, B) for kinds in all_types(job.server(ep)))


def test_set_gradient_clip_clips_on_trainers() -> None:
    job = Job(**clipped_and_decayed())
    made = types(job.trainer)
    at = made.index("clip")
    assert made[at - 1 : at + 3] == ["mul_grad", "clip", "split_byref", "send"]
    (clip,), (cut,) = only(job.trainer, "clip"), only(job.trainer, "split_byref")
    assert clip.attr("op_role") == 1
    assert cut.input("X") == clip.output("Out") == ["clip_0.tmp_0"]
    update, decayed = ["sum", "scale", "sgd"], ["sum", "scale", "scale", "sum", "sgd"]
    assert all_types(job.server(A))[1:] == [update, decayed]
    assert all_types(job.server(B))[1:] == [decayed]
    assert job.server(A).global_block().has_var("clip_0.tmp_0.block0.trainer_0")
    assert job.server(A).block(2).ops[-1].input("Param") == ["fc_w.block0"]


def test_the_argument_grad_clip_clips_on_trainers() -> None:
    """Fluid 1.8 lost the operator: the trainer sent a variable that was never produced."""
    clip = fluid.clip.GradientClipByValue(0.1)
    job = Job(optimizer=lambda: fluid.optimizer.SGD(0.1, grad_clip=clip))
    made = types(job.trainer)
    assert made.count("clip") == 2
    (cut,) = only(job.trainer, "split_byref")
    assert cut.input("X") == ["clip_1.tmp_0"]
    assert all_types(job.server(A))[1:] == [["sum", "scale", "sgd"]] * 2


def test_momentum_is_cut_with_its_parameter() -> None:
    job = Job(optimizer=lambda: fluid.optimizer.Momentum(0.1, 0.9), trainer_id=1)
    first, second = (job.server(ep).global_block() for ep in (A, B))
    assert first.var("fc_w_velocity_0").shape == second.var("fc_w_velocity_0").shape == (500, 1000)
    assert first.has_var("fc_b_velocity_0")
    assert not second.has_var("fc_b_velocity_0")


@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_state_is_cut_where_it_is_read(centered: bool) -> None:
    """Fluid never sliced the mean gradient; jaxfleet slices it if it is used."""
    job = Job(optimizer=lambda: fluid.optimizer.RMSProp(0.1, centered=centered))
    server = job.server(A)
    assert all_types(server)[1:] == [["sum", "scale", "rmsprop"]] * 2
    variables = server.global_block().vars
    assert variables["fc_w.block1"].shape == variables["fc_w_momentum_0"].shape == (500, 1000)
    wanted = (500, 1000) if centered else (1000, 1000)
    assert variables["fc_w_mean_grad_0"].shape == wanted


@pytest.mark.parametrize("name", ["DecayedAdagrad", "Ftrl", "Adadelta", "Adamax", "Adagrad"])
def test_the_state_of_an_optimizer_is_cut_with_its_parameter(name: str) -> None:
    """Fluid rejected Adadelta, whose state has the parameter's rows like any other's."""
    job = Job(optimizer=lambda: getattr(fluid.optimizer, name)(1.0))
    variables = job.server(A).global_block().vars.values()
    state = [v for v in variables if v.name.startswith("fc_w_") and "pow" not in v.name]
    assert state
    assert {v.shape for v in state} == {(500, 1000)}


@pytest.mark.parametrize("name", ["Lamb", "LarsMomentum"])
def test_what_reads_a_whole_parameters_norm_is_not_cut(name: str) -> None:
    """Fluid rejected Lamb, and sliced LarsMomentum, whose slices then had norms of their own."""
    arguments = (0.1, 0.9) if name == "LarsMomentum" else (0.1,)
    job = Job(optimizer=lambda: getattr(fluid.optimizer, name)(*arguments))
    assert params_of(job, A, B) == [["fc_b"], ["fc_w"]]


def test_an_async_job_cuts_at_run_time_and_has_no_barriers() -> None:
    job = Job(sync_mode=False, runtime_split_send_recv=True)
    assert types(job.trainer) == [*FORWARD, "send", "mul_grad", "send", "recv", "recv"]
    first, second = only(job.trainer, "send")
    assert (first.attr("sections"), first.attr("send_varnames")) == ([1000], ["fc_b@GRAD"])
    assert (second.input("X"), second.attr("epmap")) == (["fc_w@GRAD"], [B, A])
    assert second.attr("sections") == [500, 500]
    assert second.attr("send_varnames") == ["fc_w@GRAD.block0", "fc_w@GRAD.block1"]
    _, weights = only(job.trainer, "recv")
    assert (weights.output("Out"), weights.input("X")) == (["fc_w"], second.output("Out"))
    assert weights.attr("recv_varnames") == ["fc_w.block0", "fc_w.block1"]
    server = job.server(A)
    (serve,) = server.global_block().ops
    assert serve.attr("distributed_mode") == fluid.transpiler.DistributedMode.ASYNC
    assert serve.input("X") == ["fc_b@GRAD", "fc_w@GRAD.block1"]
    assert all_types(server)[1:] == [["sgd"], ["sgd"]]


@pytest.mark.parametrize("says", ["argument", "both"])
def test_a_half_async_job_updates_without_sums(says: str) -> None:
    """With only the argument, fluid's servers waited for barriers that never came."""
    config: dict[str, Any] = {"runtime_split_send_recv": False} if says == "both" else {}
    job = Job(sync_mode=False, **config)
    wanted = [*FORWARD, "send", "mul_grad", "split_byref", "send", "recv", "recv", "concat"]
    assert types(job.trainer) == wanted
    server = job.server(A)
    (serve,) = server.global_block().ops
    assert serve.attr("distributed_mode") == fluid.transpiler.DistributedMode.HALF_ASYNC
    assert all_types(server)[1:] == [["sgd"], ["sgd"]]


@pytest.mark.parametrize("trainers", [1, 2])
def test_completely_not_async_restores_barriers_and_sums(trainers: int) -> None:
    job = Job(
        sync_mode=False,
        trainers=trainers,
        runtime_split_send_recv=True,
        half_async=True,
        completely_not_async=True,
    )
    tail = ["send", "mul_grad", "send", "send_barrier", "recv", "recv"]
    assert types(job.trainer) == [*FORWARD, *tail]
    (barrier,) = only(job.trainer, "send_barrier")
    assert barrier.attr("half_async") is True
    suffix = ".trainer_0" if trainers == 2 else ""
    first, second = only(job.trainer, "send")
    assert first.attr("send_varnames") == [f"fc_b@GRAD{suffix}"]
    assert second.attr("send_varnames") == [f"fc_w@GRAD.block{i}{suffix}" for i in (0, 1)]
    server = job.server(A)
    (serve,) = server.global_block().ops
    assert serve.attr("distributed_mode") == fluid.transpiler.DistributedMode.SYNC
    update = ["sum", "scale", "sgd"] if trainers == 2 else ["sgd"]
    assert all_types(server)[1:] == [update, update]
    assert all((".trainer_" in name) is (trainers == 2) for name in serve.input("X"))


def test_an_async_job_sends_the_step_counter_of_its_schedule() -> None:
    def decayed() -> Any:
        return fluid.optimizer.SGD(fluid.layers.exponential_decay(0.1, 100, 0.99, True))

    job = Job(optimizer=decayed, sync_mode=False)
    tail = ["send", "mul_grad", "split_byref", "send", "send", "recv", "recv", "concat"]
    assert types(job.trainer) == [*FORWARD, *tail]
    begun = ["uniform_random", "recv", "recv", "fetch_barrier", "concat"]
    assert types(job.startup) == ["fill_constant"] * 4 + begun
    server = job.server(A)
    assert types(server, 1) == [
        "sum",
        "cast",
        "scale",
        "floor",
        "fill_constant",
        "elementwise_pow",
        "scale",
    ]
    assert types(server, 2) == ["sgd"]
    assert server.num_blocks == 4
    assert types(job.begun(A)) == ["fill_constant"] * 4 + ["uniform_random"]


def test_contradictory_modes_are_refused() -> None:
    config = fluid.DistributeTranspilerConfig()
    wrong = [
        ("sync_mode", None),
        ("runtime_split_send_recv", None),
        ("runtime_split_send_recv", True),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=name):
            setattr(config, name, value)
    config.sync_mode = False
    assert config.sync_mode is False
    config.runtime_split_send_recv = True
    with pytest.raises(ValueError, match="sync_mode cannot be true"):
        config.sync_mode = True


def test_delay_compensation_adds_corrections_and_copies_per_trainer() -> None:
    job = Job(sync_mode=False, enable_dc_asgd=True)
    server, begun = job.server(A), job.begun(A)
    corrects = ["ref_by_trainer_id", "elementwise_sub", "elementwise_mul", "elementwise_mul"]
    assert all_types(server)[1:] == [[*corrects, "elementwise_add", "sgd"]] * 2
    assert server.global_block().has_var("fc_b.trainer_0_bak")
    copies = [op.output("Out")[0] for op in begun.global_block().ops[-4:]]
    assert copies == [f"{p}.trainer_{t}_bak" for p in ("fc_b", "fc_w.block1") for t in (0, 1)]
    (serve,) = server.global_block().ops
    assert serve.attr("dc_asgd") is True


def test_delay_compensation_in_sync_mode_is_refused() -> None:
    job = Job(enable_dc_asgd=True)
    with pytest.raises(AssertionError, match="no late gradients"):
        job.server(A)


def test_a_pruned_trainer_still_sends() -> None:
    job = Job()
    pruned = fluid.Executor._prune_program(job.trainer, {"x": None, "y": None}, ["mean_0.tmp_0"])
    assert types(pruned) == types(job.trainer)
    assert pruned._facts == job.trainer._facts
