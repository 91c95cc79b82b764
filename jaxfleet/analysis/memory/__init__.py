"""What a step holds in memory, and plans to hold less."""

from jaxfleet.analysis.memory.apart import Apart as Apart
from jaxfleet.analysis.memory.chain import Chain as Chain
from jaxfleet.analysis.memory.chain import Plan as Plan
from jaxfleet.analysis.memory.curve import Curve as Curve
from jaxfleet.analysis.memory.curve import curve_of as curve_of
from jaxfleet.analysis.memory.even import even_plans as even_plans
from jaxfleet.analysis.memory.liveness import Value as Value
from jaxfleet.analysis.memory.offloaded import Offloaded as Offloaded
from jaxfleet.analysis.memory.offloaded import offloaded_plans as offloaded_plans
from jaxfleet.analysis.memory.phases import Phases as Phases
from jaxfleet.analysis.memory.phases import phases_of as phases_of
from jaxfleet.analysis.memory.plan import cost_of as cost_of
from jaxfleet.analysis.memory.plan import peak_of as peak_of
from jaxfleet.analysis.memory.plan import plan_for as plan_for
from jaxfleet.analysis.memory.plan import smallest as smallest
from jaxfleet.analysis.memory.stages import stages_of as stages_of
