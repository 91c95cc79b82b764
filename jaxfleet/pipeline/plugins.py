"""Plug-ins: packages that register passes of their own.

A package announces its passes in its `pyproject.toml`; installing it is then enough for the
command line and for `strategy.passes` to find them::

    [project.entry-points."jaxfleet.passes"]
    my_passes = "my_package.passes"  # a module whose import registers them
"""

from functools import cache
from importlib.metadata import entry_points

from jaxfleet.errors import PassError

GROUP = "jaxfleet.passes"


@cache
def load_plugins() -> tuple[str, ...]:
    """Imports every installed plug-in, once a process, and returns their names.

    Raises:
        PassError: a plug-in cannot be imported; it names the package that announces it.
    """
    found = entry_points(group=GROUP)
    for plugin in found:
        try:
            plugin.load()
        except Exception as error:
            package = plugin.dist.name if plugin.dist is not None else "an installed package"
            raise PassError(
                f"passes of {package} cannot be loaded: {plugin.value}: {error}",
                hint=f"repair or uninstall it; it is announced under '{GROUP}' as {plugin.name}",
            ) from error
    return tuple(sorted(plugin.name for plugin in found))
