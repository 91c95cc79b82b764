"""Optimizers, each under both of fluid's names: `SGD` and `SGDOptimizer`."""

from jaxfleet.fluid.optimizer.base import Accumulator as Accumulator
from jaxfleet.fluid.optimizer.base import Optimizer as Optimizer
from jaxfleet.fluid.optimizer.dgc import DGCMomentumOptimizer as DGCMomentumOptimizer
from jaxfleet.fluid.optimizer.rules import AdadeltaOptimizer as AdadeltaOptimizer
from jaxfleet.fluid.optimizer.rules import AdagradOptimizer as AdagradOptimizer
from jaxfleet.fluid.optimizer.rules import AdamaxOptimizer as AdamaxOptimizer
from jaxfleet.fluid.optimizer.rules import AdamOptimizer as AdamOptimizer
from jaxfleet.fluid.optimizer.rules import DecayedAdagradOptimizer as DecayedAdagradOptimizer
from jaxfleet.fluid.optimizer.rules import DpsgdOptimizer as DpsgdOptimizer
from jaxfleet.fluid.optimizer.rules import FtrlOptimizer as FtrlOptimizer
from jaxfleet.fluid.optimizer.rules import LambOptimizer as LambOptimizer
from jaxfleet.fluid.optimizer.rules import LarsMomentumOptimizer as LarsMomentumOptimizer
from jaxfleet.fluid.optimizer.rules import MomentumOptimizer as MomentumOptimizer
from jaxfleet.fluid.optimizer.rules import RMSPropOptimizer as RMSPropOptimizer
from jaxfleet.fluid.optimizer.rules import SGDOptimizer as SGDOptimizer
from jaxfleet.fluid.optimizer.wrappers import ExponentialMovingAverage as ExponentialMovingAverage
from jaxfleet.fluid.optimizer.wrappers import LookaheadOptimizer as LookaheadOptimizer
from jaxfleet.fluid.optimizer.wrappers import ModelAverage as ModelAverage
from jaxfleet.fluid.optimizer.wrappers import PipelineOptimizer as PipelineOptimizer
from jaxfleet.fluid.optimizer.wrappers import RecomputeOptimizer as RecomputeOptimizer

Adadelta = AdadeltaOptimizer
Adagrad = AdagradOptimizer
Adam = AdamOptimizer
Adamax = AdamaxOptimizer
DecayedAdagrad = DecayedAdagradOptimizer
Dpsgd = DpsgdOptimizer
Ftrl = FtrlOptimizer
Lamb = LambOptimizer
LarsMomentum = LarsMomentumOptimizer
Momentum = MomentumOptimizer
RMSProp = RMSPropOptimizer
SGD = SGDOptimizer
