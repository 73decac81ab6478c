"""The one name that a wheel installs: it has `backend` and `common` inside, out of others' way.

In a checkout they are beside it.
"""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def main() -> None:
    """Run the command line, whose child processes find the packages too."""
    place = str(_HERE if (_HERE / "backend").is_dir() else _HERE.parent)
    sys.path.insert(0, place)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [place, before]))
    from backend.cli.app import main as run

    run()
