import subprocess
import sys

CODE = """
import gc
from common.garbage import LASTING
{before}
LASTING.leave_out()
print(gc.get_freeze_count() > 1000, len(gc.get_objects()) > 1000)
ring = []
ring.append(ring)
del ring
LASTING.collect()
print(gc.get_freeze_count() > 1000, gc.collect())
"""


def told(before=""):
    """Run in a process of its own: the collector has one set of lasting objects for each."""
    code = CODE.format(before=before)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_what_lasts_is_left_out_until_all_is_collected():
    assert told() == ["True", "False", "False", "0"]


def test_what_another_has_left_out_stays_as_it_is():
    assert told("gc.collect(); gc.freeze()") == ["True", "False", "True", "0"]
