"""Gives every test eight emulated CPU devices, and keeps hypothesis to one profile."""

import jax
from hypothesis import settings

# Both must be said before JAX starts its backend, which the first array does.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# .ci/run copies this folder out and runs it against an installed wheel, where alone it can pass.
collect_ignore = ["smoke"]

# The first example of a test pays for compiling, so a deadline would find that and nothing else.
settings.register_profile("jaxfleet", deadline=None, print_blob=True)
settings.load_profile("jaxfleet")
