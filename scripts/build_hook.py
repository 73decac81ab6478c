"""Hatch build hook: wheels and editable installs get freshly generated gRPC stubs."""

import subprocess
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtoBuildHook(BuildHookInterface[Any]):
    """Runs `gen_proto.py` before a wheel is packed or a checkout is linked."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Generate the stubs, except for a source archive, which contains the proto."""
        if self.target_name == "wheel":
            subprocess.run([sys.executable, "scripts/gen_proto.py"], cwd=self.root, check=True)
