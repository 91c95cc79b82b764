"""Resizing of images and volumes."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables

_AXES = {"BILINEAR": 2, "NEAREST": 2, "TRILINEAR": 3}
_NAMES = {2: ("out_h", "out_w"), 3: ("out_d", "out_h", "out_w")}
_FORMATS = {2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


def image_resize(
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    resample: str = "BILINEAR",
    actual_shape: Any = None,
    align_corners: bool = True,
    align_mode: int = 1,
    data_format: str = "NCHW",
) -> Variable:
    """Resizes images `[b,c,h,w]`, or volumes `[b,c,d,h,w]`.

    Args:
        input: images or volumes.
        out_shape: spatial sizes of the result, as numbers.
        scale: factor of the sizes, without `out_shape`.
        name: of the layer.
        resample: `BILINEAR`, `NEAREST`, or for volumes `TRILINEAR`.
        actual_shape: unsupported; shapes are known before a run.
        align_corners: corner elements are mapped to corner elements.
        align_mode: otherwise, the position of an element: 0 for its center, 1 for its beginning.
        data_format: `NCHW` or `NHWC`, with a `D` for volumes.

    Raises:
        ProgramError: there is no such method, the input has the wrong rank, or no size is given.
    """
    if resample not in _AXES:
        raise mistake(f"image_resize: there is no resample {resample!r}", "one of BILINEAR, "
                      "NEAREST and TRILINEAR")  # fmt: skip
    layer, (x,) = f"resize_{resample.lower()}", variables("image_resize", "input", input)
    axes = _AXES[resample]
    if len(x.shape) != axes + 2:
        raise mistake(f"{layer} takes {axes + 2} axes, not {list(x.shape)}")
    if data_format not in _FORMATS[axes]:
        wanted = " or ".join(map(repr, _FORMATS[axes]))
        raise mistake(f"{layer}: data_format is {wanted}, not {data_format!r}")
    if align_mode not in {0, 1}:
        raise mistake(f"{layer}: align_mode is 0 or 1, not {align_mode!r}")
    attrs = {
        **_wanted(layer, axes, out_shape, scale, actual_shape),
        "interp_method": resample.lower(),
        "align_corners": align_corners,
        "align_mode": align_mode,
        "data_layout": "NHWC" if data_format.endswith("C") else "NCHW",
    }
    (made,) = LayerHelper(f"{resample.lower()}_interp", name).add({"X": x}, {"Out": x.dtype}, attrs)
    return made


def resize_bilinear(
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    actual_shape: Any = None,
    align_corners: bool = True,
    align_mode: int = 1,
    data_format: str = "NCHW",
) -> Variable:
    """Resizes images by bilinear interpolation: see `image_resize`."""
    how = (align_corners, align_mode, data_format)
    return image_resize(input, out_shape, scale, name, "BILINEAR", actual_shape, *how)


def resize_trilinear(
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    actual_shape: Any = None,
    align_corners: bool = True,
    align_mode: int = 1,
    data_format: str = "NCDHW",
) -> Variable:
    """Resizes volumes by trilinear interpolation: see `image_resize`."""
    how = (align_corners, align_mode, data_format)
    return image_resize(input, out_shape, scale, name, "TRILINEAR", actual_shape, *how)


def resize_nearest(
    input: Variable,
    out_shape: Sequence[int] | None = None,
    scale: float | None = None,
    name: str | None = None,
    actual_shape: Any = None,
    align_corners: bool = True,
    data_format: str = "NCHW",
) -> Variable:
    """Resizes images by nearest-neighbor interpolation: see `image_resize`."""
    how = (align_corners, 1, data_format)
    return image_resize(input, out_shape, scale, name, "NEAREST", actual_shape, *how)


def image_resize_short(input: Variable, out_short_len: int, resample: str = "BILINEAR") -> Variable:
    """Resizes images `[b,c,h,w]` to a given shorter side, keeping the aspect ratio.

    Raises:
        ProgramError: the input is not images of known sizes.
    """
    (x,) = variables("image_resize_short", "input", input)
    if len(x.shape) != 4 or min(x.shape[2:]) < 0:
        what = f"image_resize_short takes images of known sizes, not {list(x.shape)}"
        raise mistake(what)
    short = min(x.shape[2:])
    sizes = [int(size * (out_short_len / short) + 0.5) for size in x.shape[2:]]
    sizes[x.shape[2:].index(short)] = out_short_len
    return image_resize(input, sizes, resample=resample)


def _wanted(
    layer: str, axes: int, out_shape: Any, scale: Any, actual_shape: Any
) -> dict[str, float]:
    parts = list(out_shape) if isinstance(out_shape, list | tuple) else [out_shape]
    given = {"out_shape": parts, "scale": [scale], "actual_shape": [actual_shape]}
    for argument, values in given.items():
        is_given = argument == "actual_shape" and actual_shape is not None
        if is_given or any(isinstance(value, Variable) for value in values):
            what = f"{layer}: '{argument}' is a variable, and shapes are known before a run"
            raise mistake(what, "give numbers")
    if out_shape is None and scale is None:
        raise mistake(f"{layer}: neither out_shape nor scale is given")
    if out_shape is None:
        if not scale > 0:
            raise mistake(f"{layer}: scale is more than 0, not {scale!r}")
        return {"scale": float(scale)}
    if len(parts) != axes or not all(isinstance(n, int) and n > 0 for n in parts):
        raise mistake(f"{layer}: out_shape is {axes} numbers of at least 1, not {out_shape!r}")
    return dict(zip(_NAMES[axes], parts, strict=True))
