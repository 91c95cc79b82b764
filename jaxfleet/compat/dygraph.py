"""`paddle.fluid.dygraph`: importable, but eager execution is rejected.

Static programs import it without using it, or to check whether it is on. A class can be subclassed
(scripts subclass models at import); creating an object is rejected.
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
    """Whether operators run eagerly; always False."""
    return False


def disable_dygraph() -> None:
    """Does nothing: programs are always built."""


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
