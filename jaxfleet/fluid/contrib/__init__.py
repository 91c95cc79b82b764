"""What fluid kept beside its main names."""

from jaxfleet.fluid.contrib.memory_usage_calc import memory_usage as memory_usage
