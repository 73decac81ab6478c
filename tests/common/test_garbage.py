import subprocess
import sys

CODE = """
import gc
from common.machine_memory import LASTING
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
    return run(CODE.format(before=before))


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_what_lasts_is_left_out_until_all_is_collected():
    assert told() == ["True", "False", "False", "0"]


def test_what_another_has_left_out_stays_as_it_is():
    assert told("gc.collect(); gc.freeze()") == ["True", "False", "True", "0"]


def test_it_is_left_out_at_once_without_a_collection():
    code = """
import gc
from common.machine_memory import LASTING
ring = []
ring.append(ring)
collections = gc.get_stats()[2]["collections"]
LASTING.leave_out_at_once()
LASTING.leave_out_at_once()
print(gc.get_freeze_count() > 1000, len(gc.get_objects()) > 1000)
print(gc.get_stats()[2]["collections"] - collections)
del ring
LASTING.collect()
print(gc.get_freeze_count() > 1000)
"""
    assert run(code) == ["True", "False", "0", "False"]
