"""Paddle's `fluid.contrib`."""

from jaxfleet.fluid.contrib import mixed_precision as mixed_precision
from jaxfleet.fluid.contrib.memory_usage_calc import memory_usage as memory_usage
