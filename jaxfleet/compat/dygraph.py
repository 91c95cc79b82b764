"""`paddle.fluid.dygraph`: it can be imported; what runs operators as they are written is refused.

Static programs import it without using it, or to ask whether it is on. A class can be derived
from (models are, where a script is imported); it is the first object that is refused.
"""

from typing import Any, NoReturn

from jaxfleet.errors import ProgramError

_LISTED = """
BCELoss BackwardStrategy BatchNorm BilinearTensorProduct Conv2D Conv2DTranspose Conv3D
Conv3DTranspose CosineDecay DataParallel Dropout Embedding Env ExponentialDecay GRUUnit GroupNorm
InstanceNorm InverseTimeDecay L1Loss LambdaDecay Layer LayerList LayerNorm Linear LinearLrWarmup
MSELoss MultiStepDecay NCE NLLLoss NaturalExpDecay NoamDecay PRelu ParallelEnv ParallelStrategy
ParameterList PiecewiseDecay PolynomialDecay Pool2D ProgramTranslator ReduceLROnPlateau Sequential
SpectralNorm StaticModelRunner StepDecay Tracer TracedLayer TreeConv declarative
dygraph_to_static_func enable_dygraph enable_imperative grad guard load_dygraph no_grad
prepare_context save_dygraph to_variable
"""
_NAMES = frozenset(_LISTED.split())


def enabled() -> bool:
    """Whether operators run as they are written: they never do here."""
    return False


def disable_dygraph() -> None:
    """Goes back to building programs, which are built anyway."""


disable_imperative = disable_dygraph


class _Refused:
    def __new__(cls, *args: Any, **options: Any) -> NoReturn:
        del args, options
        name = next(kind.__name__ for kind in cls.__mro__ if kind.__name__ in _NAMES)
        hint = "build a program and run it by an Executor, or write the step in jax (jf.distribute)"
        raise ProgramError(
            f"fluid.dygraph.{name}: operators cannot run as they are written", hint=hint
        )


def __getattr__(name: str) -> type[_Refused]:
    if name not in _NAMES:
        raise AttributeError(name)
    return type(name, (_Refused,), {"__module__": __name__})
