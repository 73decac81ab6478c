"""The kernels of OpenBLAS, which an old version chooses badly for a new processor."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.openblas import find_openblas, kernel_name, preloading, suited_kernels

AVX2 = "fpu sse2 fma avx avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16"


class Chosen:
    """A library that has chosen kernels of this name."""

    def __init__(self, name):
        def corename():
            return name.encode()

        self.openblas_get_corename = corename


def advice(chosen, facts, tmp_path):
    place = tmp_path / "cpuinfo"
    place.write_text(facts)
    return suited_kernels(chosen, place)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (AVX512, {"OPENBLAS_CORETYPE": "SkylakeX"}),
        (AVX512.replace("avx512vl", ""), {"OPENBLAS_CORETYPE": "Haswell"}),
        (AVX2, {"OPENBLAS_CORETYPE": "Haswell"}),
        ("fpu sse2 ssse3", {}),
    ],
)
def test_an_unknown_processor_gets_the_best_kernels_that_it_can_run(flags, expected, tmp_path):
    facts = f"model name\t: new\nflags\t\t: {flags}\nbugs\t\t:\n"
    assert advice(Chosen("Prescott"), facts, tmp_path) == expected


@pytest.mark.parametrize("library", [Chosen("Zen"), Chosen("SkylakeX"), SimpleNamespace()])
def test_a_known_processor_and_another_library_are_left_alone(library, tmp_path):
    assert advice(library, f"flags : {AVX512}\n", tmp_path) == {}


def test_nothing_is_named_where_nothing_describes_the_processor(tmp_path):
    assert advice(Chosen("Prescott"), "Features : asimd\n", tmp_path) == {}
    assert suited_kernels(Chosen("Prescott"), tmp_path / "absent") == {}
    assert kernel_name() == "" or find_openblas()


@pytest.mark.skipif(find_openblas() is None, reason="this system has no OpenBLAS")
@pytest.mark.skipif(" avx2 " not in Path("/proc/cpuinfo").read_text(), reason="an old processor")
def test_a_process_multiplies_with_kernels_of_this_century_unless_told_otherwise():
    code = "from common.openblas import kernel_name; print(kernel_name())"
    names = {}
    for chosen in ({}, {"OPENBLAS_CORETYPE": "Prescott"}):
        environment = preloading({"PYTHONPATH": str(Path.cwd()), **chosen}, find_openblas())
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        names[bool(chosen)] = done.stdout.strip()
    assert names[True] == "Prescott"
    assert names[False] not in {"", "Prescott"}
