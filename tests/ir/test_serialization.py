"""Constants, and programs in files."""

import json
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxfleet.errors import ProgramError
from jaxfleet.ir import (
    Block,
    Constant,
    Kind,
    Program,
    Variable,
    load_program,
    make_constant,
    parse,
    print_program,
    save_program,
    verify,
    with_values,
)
from jaxfleet.ir.array_files import FORMAT, VERSION, ArrayFileError, read_arrays
from jaxfleet.ir.variable import dtype_of

DTYPES = (
    *("bool", "int8", "int64", "uint16", "float16", "float32", "float64", "complex64"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint2"),
)


def const(name: str, value: Any) -> Variable:
    array = np.asarray(value)
    return Variable(name, dtype_of(array), array.shape, Kind.CONST, make_constant(array))


def program_of(*constants: Variable) -> Program:
    return Program(variables={variable.name: variable for variable in constants})


def value_of(program: Program, name: str) -> Any:
    constant = program.variables[name].constant
    assert constant is not None
    return constant.value


def digest_of(array: np.ndarray[Any, Any]) -> str:
    return make_constant(array).digest


def dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def test_a_program_is_on_disk_before_it_replaces_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set(), os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    save_program(program_of(const("c", np.arange(99.0))), tmp_path / "p.txt")
    files = [tmp_path, tmp_path / "p.txt", tmp_path / "p.npz"]
    assert synced >= {file.stat().st_ino for file in files}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5), (3,)])
def test_a_value_of_any_dtype_comes_back_bit_by_bit(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype_named(dtype))
    program = program_of(const("c", array))
    verify(program)
    save_program(program, tmp_path / "p.txt")
    back = load_program(tmp_path / "p.txt")
    assert back == program
    assert value_of(back, "c").dtype == array.dtype
    assert value_of(back, "c").shape == shape
    assert value_of(back, "c").tobytes() == array.tobytes()


def test_constants_in_blocks_are_kept_too(tmp_path: Path) -> None:
    table = const("table", np.zeros((100, 4), np.float32))
    program = Program(blocks=(Block(), Block(1, 0, {"table": table})))
    save_program(program, tmp_path / "p.txt", source=True)
    loaded = load_program(tmp_path / "p.txt").blocks[1].variables["table"]
    assert loaded == table
    assert loaded.constant is not None
    assert loaded.constant.value.shape == (100, 4)


def test_a_program_without_large_constants_is_one_file(tmp_path: Path) -> None:
    program = program_of(const("c", [1.0, 2.0]))
    save_program(program, tmp_path / "p.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]
    assert value_of(load_program(tmp_path / "p.txt"), "c").tolist() == [1.0, 2.0]


def test_saving_again_replaces_the_files_and_leaves_no_others(tmp_path: Path) -> None:
    for size in (10, 20):
        save_program(program_of(const("c", np.arange(size))), tmp_path / "p.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.npz", "p.txt"]
    assert value_of(load_program(tmp_path / "p.txt"), "c").shape == (20,)


def test_what_cannot_be_saved_leaves_the_old_files_as_they_were(tmp_path: Path) -> None:
    save_program(program_of(const("c", np.arange(10))), tmp_path / "p.txt")
    valueless = Variable("c", "f32", (10,), Kind.CONST, Constant("c1"))
    with pytest.raises(ProgramError, match=r"the constant 'c' \(@c1\) has no value to save"):
        save_program(program_of(valueless), tmp_path / "p.txt")
    assert value_of(load_program(tmp_path / "p.txt"), "c").shape == (10,)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_value_that_was_written_to_is_not_saved(tmp_path: Path) -> None:
    array = np.arange(10)
    program = program_of(const("c", array))
    array[0] = 7
    with pytest.raises(ProgramError, match="holds another value"):
        save_program(program, tmp_path / "p.txt")


def test_missing_values_are_named_by_their_file(tmp_path: Path) -> None:
    save_program(program_of(const("c", np.arange(10))), tmp_path / "p.txt")
    (tmp_path / "p.npz").unlink()
    with pytest.raises(ProgramError, match=r"1 constants have no values: there is no .*p\.npz"):
        load_program(tmp_path / "p.txt")


def test_a_value_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    save_program(program_of(const("c", np.arange(10))), tmp_path / "p.txt")
    save_program(program_of(const("c", np.arange(11))), tmp_path / "q.txt")
    (tmp_path / "q.npz").replace(tmp_path / "p.npz")
    with pytest.raises(ProgramError, match=r"no value for the constant 'c' \(@c[0-9a-f]{16}\)"):
        load_program(tmp_path / "p.txt")


@pytest.mark.parametrize("damage", [b"", b"no archive", b"PK\x03\x04 half of one"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    save_program(program_of(const("c", np.arange(10))), tmp_path / "p.txt")
    (tmp_path / "p.npz").write_bytes(damage)
    with pytest.raises(ProgramError, match=r"p\.npz is damaged: "):
        load_program(tmp_path / "p.txt")


def test_a_value_other_than_its_digest_says_is_refused(tmp_path: Path) -> None:
    program = program_of(const("c", np.arange(10, dtype=np.float32)))
    save_program(program, tmp_path / "p.txt")
    digest = parse((tmp_path / "p.txt").read_text()).variables["c"].constant
    assert digest is not None
    data = np.arange(40, dtype=np.uint8)
    entries: dict[str, Any] = {digest.digest: data, f"{digest.digest}.type": np.array("f32[10]")}
    np.savez(tmp_path / "p.npz", allow_pickle=False, **entries)
    with pytest.raises(ProgramError, match=r"constant 'c' \(@.*\) is another: f32\[10\]"):
        load_program(tmp_path / "p.txt")


@pytest.mark.parametrize("dtype", ["bool", "float32", "bfloat16", "int4", "complex128"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_values_written_before_are_read(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """Files had the bytes under the digest, and the type in another entry."""
    array = np.ones(shape, dtype_named(dtype))
    variable = const("c", array)
    (tmp_path / "p.txt").write_text(f"program p\n  const c: {variable.type} = @{digest_of(array)}")
    data = np.frombuffer(array.tobytes(), np.uint8)
    entries = {digest_of(array): data, f"{digest_of(array)}.type": np.array(variable.type)}
    np.savez(tmp_path / "p.npz", allow_pickle=False, **entries)
    back = value_of(load_program(tmp_path / "p.txt"), "c")
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, shape, array.tobytes())


def test_values_of_another_byte_order_come_back_in_this_machines(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.dtype("f4").newbyteorder())
    save_program(program_of(const("c", array)), tmp_path / "p.txt")
    back = value_of(load_program(tmp_path / "p.txt"), "c")
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    ("dtypes", "what"),
    [
        ({"a": "nonsense"}, "numpy has no dtype 'nonsense'"),
        ({"a": "f32[2"}, "'f32[2' is not a type"),
        ({"a": "f32[1048576,1048576]"}, "has no bytes"),
        (["a"], "items"),
    ],
)
def test_a_table_of_types_that_does_not_fit_is_damage(
    tmp_path: Path, dtypes: Any, what: str
) -> None:
    table = {"format": FORMAT, "version": VERSION, "dtypes": dtypes}
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        with archive.open("a.npy", "w") as member:
            np.lib.format.write_array(member, np.zeros(0, np.uint8))
        archive.writestr("jaxfleet.json", json.dumps(table))
    with pytest.raises(ArrayFileError, match=re.escape(what)):
        read_arrays(tmp_path / "a.npz")


def test_values_without_bytes_come_back(tmp_path: Path) -> None:
    array = np.zeros((2, 3), np.dtype([("float0", np.void, 0)]))
    save_program(program_of(const("c", array)), tmp_path / "p.txt")
    back = value_of(load_program(tmp_path / "p.txt"), "c")
    assert (back.dtype, back.shape) == (array.dtype, (2, 3))


def test_pickled_values_are_not_loaded(tmp_path: Path) -> None:
    program = program_of(const("c", np.arange(10)))
    save_program(program, tmp_path / "p.txt")
    constant = program.variables["c"].constant
    assert constant is not None
    objects = np.array([{"any": "object"}], dtype=object)
    entries = {constant.digest: objects, f"{constant.digest}.type": np.array("i64[10]")}
    np.savez(tmp_path / "p.npz", allow_pickle=True, **entries)
    with pytest.raises(ProgramError, match="is damaged: Object arrays cannot be loaded"):
        load_program(tmp_path / "p.txt")


def test_the_text_cannot_have_the_values_name(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"cannot have the suffix \.npz"):
        save_program(program_of(const("c", np.arange(10))), tmp_path / "p.npz")


def test_values_can_be_given_to_a_parsed_program() -> None:
    array = np.arange(10)
    program = program_of(const("c", array))
    text = print_program(program)
    assert re.search(r"const c: i64\[10\] = @c[0-9a-f]{16}$", text, re.MULTILINE)
    back = with_values(parse(text), {make_constant(array).digest: array, "other": array})
    assert value_of(back, "c") is array
    with pytest.raises(ProgramError, match="no value for the constant 'c'"):
        with_values(parse(text), {})


def test_digests_tell_types_apart() -> None:
    zeros = [np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32)]
    assert len({make_constant(array).digest for array in zeros}) == 3
    assert make_constant(zeros[0]) == make_constant(zeros[0].astype(">f4"))
    assert make_constant(zeros[2]) == make_constant(np.asfortranarray(zeros[2]))


@pytest.mark.parametrize("value", [["text"], [None], np.zeros(2, "M8[s]")])
def test_a_constant_holds_numbers_only(value: object) -> None:
    with pytest.raises(ProgramError, match="a constant cannot hold dtype"):
        make_constant(value)


@given(
    hnp.arrays(
        st.sampled_from([dtype_named(name) for name in ("bool", "int8", "float16", "float32")]),
        hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
    )
)
def test_small_values_stand_in_the_text(array: np.ndarray[Any, Any]) -> None:
    program = program_of(const("c", array))
    text = print_program(program)
    assert parse(text) == program
    if array.size <= 8 and "@" not in text:
        assert value_of(parse(text), "c").tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array([0.1, np.inf, -0.0, np.nan], np.float32), "f32[4] = [0.1, inf, -0.0, nan]"),
        (np.array([[1, 2], [3, 4]], np.int32), "i32[2,2] = [1, 2, 3, 4]"),
        (np.bool_(1), "bool[] = [true]"),
        (np.array([1.5], ml_dtypes.bfloat16), "bf16[1] = [1.5]"),
        (np.zeros((0, 3), np.uint8), "u8[0,3] = []"),
    ],
)
def test_small_values_print_as_short_as_they_can(value: np.ndarray[Any, Any], text: str) -> None:
    assert print_program(program_of(const("c", value))).splitlines()[1] == f"  const c: {text}"


def test_a_value_that_its_digest_does_not_name_prints_by_the_digest() -> None:
    variable = const("c", [1.0])
    odd = replace(variable, constant=Constant("mine", np.array([1.0])))
    assert "= @mine" in print_program(program_of(odd))
    nan = np.array([0x7FC00001], np.uint32).view(np.float32)  # not the NaN that `nan` reads as
    assert "= @c" in print_program(program_of(const("c", nan)))
