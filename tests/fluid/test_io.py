"""Saved values are loaded completely or not at all; mismatches are named."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import CheckpointError, SavedError
from jaxfleet.fluid import io, layers
from jaxfleet.fluid.npz_files import arrays_writer, file_of, read_arrays, write_files
from tests.fluid.nets import fresh

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4) / 8


@dataclass
class Trained:
    main: fluid.Program
    startup: fluid.Program
    exe: fluid.Executor
    out: fluid.Variable
    loss: fluid.Variable

    def values(self) -> dict[str, np.ndarray]:
        kept = io.get_program_persistable_vars(self.main)
        return {v.name: np.array(fluid.global_scope().var(v.name).get_tensor()) for v in kept}

    def step(self) -> None:
        self.exe.run(self.main, feed={"x": ROWS})

    def begin_again(self) -> None:
        """Sets every value to one."""
        for name, value in self.values().items():
            fluid.global_scope().var(name).get_tensor().set(np.ones_like(value))


@pytest.fixture
def trained() -> Iterator[Trained]:
    """Builds a line with its optimizer's state, and trains it for a step."""
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        x = layers.data("x", [4])
        out = layers.fc(x, 3, act="relu", param_attr="hidden/w", bias_attr="b")
        loss = layers.mean(layers.dropout(layers.fc(out, 1, bias_attr=False), 0.5))
        layers.create_global_var([2], 7, "int64", persistable=True, name="seen")
        fluid.optimizer.Momentum(0.1, 0.9).minimize(loss)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup)
        made = Trained(main, startup, exe, out, loss)
        made.step()
        yield made


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("filename", [None, "all.npz"])
def test_all_that_outlives_a_run_comes_back(
    trained: Trained, tmp_path: Path, filename: str | None
) -> None:
    wanted = trained.values()
    assert "b_velocity_0" in wanted
    io.save_persistables(trained.exe, str(tmp_path), trained.main, filename)
    trained.begin_again()
    io.load_persistables(trained.exe, str(tmp_path), trained.main, filename)
    assert_same(trained.values(), wanted)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == ({"all.npz"} if filename else {file_of(tmp_path, name).name for name in wanted})


def test_parameters_alone_are_saved_where_that_is_asked(trained: Trained, tmp_path: Path) -> None:
    io.save_params(trained.exe, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"hidden%2Fw", "b", "fc_1.w_0"}
    wanted = trained.values()
    trained.begin_again()
    io.load_params(trained.exe, tmp_path)
    found = trained.values()
    for name in ("hidden/w", "b", "fc_1.w_0"):
        np.testing.assert_array_equal(found[name], wanted[name])
    assert found["b_velocity_0"].tolist() == [1.0, 1.0, 1.0]


def test_a_script_chooses_what_is_saved(trained: Trained, tmp_path: Path) -> None:
    block = trained.main.global_block()
    io.save_vars(trained.exe, tmp_path, trained.main, vars=[block.var("b")])
    io.save_vars(trained.exe, tmp_path, predicate=lambda v: v.name == "seen", filename="one")
    assert {path.name for path in tmp_path.iterdir()} == {"b", "one"}
    arrays = read_arrays(tmp_path / "one")
    assert arrays["seen"].dtype == np.int64  # as declared, though it is computed in 32 bits
    assert arrays["seen"].tolist() == [7, 7]
    with np.load(tmp_path / "one") as opened:
        assert opened["seen"].tolist() == [7, 7]
    with pytest.warns(UserWarning, match="no variable to save"):
        io.save_vars(trained.exe, tmp_path, predicate=lambda _: False)


def test_a_model_that_is_used_is_cut_down_to_what_it_needs(
    trained: Trained, tmp_path: Path
) -> None:
    text = str(trained.main)
    trained.main._facts.update(role="trainer")
    names = io.save_inference_model(str(tmp_path), ["x"], [trained.out], trained.exe)
    (wanted,) = trained.exe.run(
        trained.main.clone(for_test=True), feed={"x": ROWS}, fetch_list=[trained.out]
    )
    assert names == [trained.out.name]
    assert str(trained.main) == text
    assert {path.name for path in tmp_path.iterdir()} == {"__model__", "b", "hidden%2Fw"}
    with fluid.scope_guard(fluid.Scope()):
        exe = fluid.Executor()
        program, fed, targets = io.load_inference_model(tmp_path, exe)
        (found,) = exe.run(program, feed={fed[0]: ROWS}, fetch_list=targets)
    np.testing.assert_array_equal(found, wanted)
    assert program._facts == {}
    assert [op.type for op in program.global_block().ops] == ["mul", "elementwise_add", "relu"]


def test_a_model_may_be_fed_in_its_middle_and_lie_in_two_files(
    trained: Trained, tmp_path: Path
) -> None:
    hidden, exe = trained.out.name, trained.exe
    io.save_inference_model(tmp_path, hidden, trained.loss, exe, None, "model", "weights")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "weights"}
    given = np.ones((2, 3), np.float32)
    program, fed, targets = io.load_inference_model(tmp_path, exe, "model", "weights")
    assert fed == [hidden]
    (found,) = exe.run(program, feed={hidden: given}, fetch_list=targets)
    weight = trained.values()["fc_1.w_0"]
    np.testing.assert_allclose(found, [(given @ weight).mean() * 0.5], rtol=1e-6)


def test_a_whole_program_is_saved_to_train_on(trained: Trained, tmp_path: Path) -> None:
    io.save_inference_model(tmp_path, ["x"], trained.loss, trained.exe, export_for_deployment=False)
    program = fluid.Program.parse_from_string((tmp_path / "__model__.main_program").read_bytes())
    assert str(program) == str(trained.main)
    assert (tmp_path / "b_velocity_0").exists()
    io.save_inference_model(tmp_path / "any", [], [], trained.exe, export_for_deployment=False)
    whole = (tmp_path / "any" / "__model__.main_program").read_bytes()
    assert str(fluid.Program.parse_from_string(whole)) == str(trained.main)
    only = tmp_path / "only"
    io.save_inference_model(only, ["x"], trained.loss, trained.exe, program_only=True)
    assert [path.name for path in only.iterdir()] == ["__model__"]


def test_what_is_no_model(trained: Trained, tmp_path: Path) -> None:
    exe, out = trained.exe, trained.out
    with pytest.raises(ValueError, match="none' is no folder"):
        io.load_inference_model(tmp_path / "none", exe)
    with pytest.raises(SavedError, match=r"cannot read .*__model__"):
        io.load_inference_model(tmp_path, exe)
    with pytest.raises(ValueError, match="feeded_var_names are not all texts"):
        io.save_inference_model(tmp_path, [out], [out], exe)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="target_vars are not Variables"):
        io.save_inference_model(tmp_path, ["x"], ["out"], exe)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'x' is read, and neither fed nor computed"):
        io.save_inference_model(tmp_path, [], [out], exe)
    with pytest.raises(TypeError, match=r"executor is of type \w+, not Executor"):
        io.save_inference_model(tmp_path, ["x"], [out], "exe")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"main_program is of type \w+, not Program"):
        io.save_inference_model(tmp_path, ["x"], [out], exe, "main")  # type: ignore[arg-type]
    (tmp_path / "__model__").write_bytes(b"{")
    with pytest.raises(SavedError, match="__model__ is damaged"):
        io.load_inference_model(tmp_path, exe)
    (tmp_path / "__model__").write_bytes(trained.main.serialize_to_string())
    with pytest.raises(SavedError, match="is a program, and no model"):
        io.load_inference_model(tmp_path, exe)


def test_the_whole_state_is_saved_by_a_prefix(trained: Trained, tmp_path: Path) -> None:
    prefix, wanted = str(tmp_path / "epoch1"), trained.values()
    fluid.save(trained.main, prefix)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"epoch1.pdparams", "epoch1.pdopt", "epoch1.pdmodel"}
    trained.begin_again()
    fluid.load(trained.main, prefix + ".pdparams")
    assert_same(trained.values(), wanted)
    state = io.load_program_state(prefix)
    assert state.keys() == wanted.keys()
    trained.begin_again()
    io.set_program_state(trained.main, state)
    assert_same(trained.values(), wanted)
    with pytest.warns(UserWarning, match="the program has no other"):
        io.set_program_state(trained.main, {"other": np.zeros(1)})
    with pytest.raises(SavedError, match=r"'b' has shape \[2\] in the state, and \[3\]"):
        io.set_program_state(trained.main, {"b": np.zeros(2, np.float32)})
    with fluid.scope_guard(fluid.Scope()), pytest.raises(AssertionError, match="no value"):
        io.set_program_state(trained.main, state)
    with pytest.raises(AssertionError, match="names a folder"):
        fluid.save(trained.main, f"{tmp_path}/")
    with pytest.raises(TypeError, match="model_path is of type PosixPath, not str"):
        fluid.save(trained.main, tmp_path / "all")  # type: ignore[arg-type]


def test_older_ways_of_saving_are_loaded_by_the_newer_call(
    trained: Trained, tmp_path: Path
) -> None:
    wanted = trained.values()
    io.save_persistables(trained.exe, tmp_path / "each")
    io.save_persistables(trained.exe, tmp_path, filename="all")
    assert_same(io.load_program_state(str(tmp_path / "each")), wanted)
    assert_same(io.load_program_state(str(tmp_path / "all")), wanted)
    kept = io.get_program_persistable_vars(trained.main)
    ways: list[tuple[str, Any]] = [("each", None), ("all", kept)]
    for path, variables in ways:
        trained.begin_again()
        fluid.load(trained.main, str(tmp_path / path), trained.exe, variables)
        assert_same(trained.values(), wanted)
    with pytest.raises(ValueError, match=r"there is no .*each\.pdparams"):
        fluid.load(trained.main, str(tmp_path / "each"))
    with pytest.raises(ValueError, match="var_list does not say"):
        fluid.load(trained.main, str(tmp_path / "all"), trained.exe)
    (tmp_path / "each.pdparams").write_bytes((tmp_path / "all").read_bytes())
    with pytest.raises(SavedError, match=r"there is no .*each.pdopt"):
        fluid.load(trained.main, str(tmp_path / "each"))


def test_what_does_not_fit_is_named_and_nothing_is_loaded(trained: Trained, tmp_path: Path) -> None:
    io.save_persistables(trained.exe, tmp_path, filename="all")
    trained.step()
    now = trained.values()
    with fresh():
        block = fluid.default_main_program().global_block()
        declared: list[tuple[dict[str, Any], str]] = [
            ({"shape": [4]}, r"'b' has shape \[3\] in .*all, and \[4\] in the program"),
            ({"shape": [3, 1]}, r"'b' has shape \[3\] in"),
            ({"shape": [3], "dtype": "int32"}, "'b' is float32 in .*all, and int32 in the program"),
        ]
        for said, message in declared:
            block.vars.clear()
            block.create_var(name="seen", shape=[2], dtype="int64", persistable=True)
            block.create_var(name="b", persistable=True, **said)
            with pytest.raises(RuntimeError, match=message) as caught:
                io.load_persistables(trained.exe, tmp_path, filename="all")
            assert isinstance(caught.value, CheckpointError)
        block._remove_var("b")
        block.create_var(name="new", shape=[1], persistable=True)
        with pytest.raises(SavedError, match="'new' is not saved in"):
            io.load_persistables(trained.exe, tmp_path, filename="all")
        with pytest.raises(SavedError, match="'seen' is not saved in"):
            io.load_persistables(trained.exe, tmp_path)
    assert_same(trained.values(), now)


def test_a_variable_without_a_value_is_named_and_nothing_is_written(
    trained: Trained, tmp_path: Path
) -> None:
    with fluid.scope_guard(fluid.Scope()), pytest.raises(SavedError, match="has no value"):
        io.save_persistables(trained.exe, tmp_path / "new", trained.main)
    assert list(tmp_path.rglob("*")) == []
    fluid.global_scope().var("seen").get_tensor().set(np.zeros(2, np.float32))
    with pytest.raises(SavedError, match="'seen' is float32 in the scope, and int64"):
        io.save_persistables(trained.exe, tmp_path / "new", trained.main, "all")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_save_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "v"
    write_files([(path, arrays_writer([("v", ROWS)]))])

    def breaks() -> Iterator[tuple[str, np.ndarray]]:
        yield "v", ROWS + 1
        raise OSError(28, "No space left on device")

    with pytest.raises(SavedError, match=r"cannot write .*w: No space left"):
        write_files(
            [(path, arrays_writer([("v", ROWS + 1)])), (tmp_path / "w", arrays_writer(breaks()))]
        )
    assert [found.name for found in tmp_path.iterdir()] == ["v"]
    np.testing.assert_array_equal(read_arrays(path)["v"], ROWS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool", "uint8", "float64"])
def test_every_dtype_comes_back(tmp_path: Path, dtype: str) -> None:
    known = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    arrays = {"rows": (ROWS * 8).astype(known), "none": np.zeros((0, 2), known),
              "one": np.ones((), known)}  # fmt: skip
    write_files([(tmp_path / "all", arrays_writer(arrays.items()))])
    found = read_arrays(tmp_path / "all")
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_damage_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "all"
    write_files([(path, arrays_writer([("v", np.arange(64, dtype=np.float32))]))])
    data = path.read_bytes()
    middle = data.index(np.float32(40).tobytes() + np.float32(41).tobytes())
    for wrong in (
        b"", b"\x93NUMPY", data[: len(data) // 2],
        data[:middle] + b"\x00\x00\x00\x01" + data[middle + 4 :],
    ):  # fmt: skip
        path.write_bytes(wrong)
        with pytest.raises(SavedError, match="all is damaged, or none of ours"):
            read_arrays(path)


@pytest.mark.parametrize("name", ["..", ".", "../up", "/etc/x", "a/b", "w@GRAD", "fc_0.w_0"])
def test_a_name_is_never_a_path(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, name)
    assert path.parent == tmp_path
    assert path.resolve().parent == tmp_path.resolve()


def test_numbers_that_do_not_fit_in_32_bits_are_named(trained: Trained, tmp_path: Path) -> None:
    write_files([(tmp_path / "seen", arrays_writer([("seen", np.array([1, 1 << 40]))]))])
    with pytest.raises(SavedError, match=r"'seen' in .* numbers that do not fit in int32"):
        io.load_vars(trained.exe, tmp_path, predicate=lambda v: v.name == "seen")
