"""Builds no wheel for an environment that has Liger-Kernel itself."""

import sysconfig
from importlib.metadata import distributions
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Refuse(BuildHookInterface):
    """Called by hatchling before it builds."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Look in the environment of this interpreter: an isolated build does not see it on `sys.path`."""
        folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        for found in distributions(name="liger-kernel", path=folders):
            if "+strata" not in found.version:
                raise RuntimeError(
                    f"liger-kernel {found.version} is installed in {found.locate_file('')}, and Strata takes its name: "
                    "pip uninstall liger-kernel"
                )
