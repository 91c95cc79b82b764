"""Memory of a step: liveness, profile, and plans that stay within a budget."""

from jaxfleet.analysis.memory.chain import Chain as Chain
from jaxfleet.analysis.memory.chain import RecomputePlan as RecomputePlan
from jaxfleet.analysis.memory.cuts import ExecutableCuts as ExecutableCuts
from jaxfleet.analysis.memory.live_ranges import LiveRange as LiveRange
from jaxfleet.analysis.memory.ordering import ScheduleConstraints as ScheduleConstraints
from jaxfleet.analysis.memory.ordering import schedule_constraints as schedule_constraints
from jaxfleet.analysis.memory.plans import OffloadPlan as OffloadPlan
from jaxfleet.analysis.memory.plans import cost_of as cost_of
from jaxfleet.analysis.memory.plans import offload_plans as offload_plans
from jaxfleet.analysis.memory.plans import peak_of as peak_of
from jaxfleet.analysis.memory.plans import plan_for as plan_for
from jaxfleet.analysis.memory.plans import smallest_budget as smallest_budget
from jaxfleet.analysis.memory.plans import uniform_plans as uniform_plans
from jaxfleet.analysis.memory.profile import MemoryProfile as MemoryProfile
from jaxfleet.analysis.memory.profile import memory_profile as memory_profile
from jaxfleet.analysis.memory.stages import stages_of as stages_of
