import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULE_CEILING = 800
LOOP_CEILING = 400
MODULE_FLOOR = 40
PACKAGE_FILES = ("__init__.py", "__main__.py")
FUNCTION_CEILING = 55
FUNCTION_P90 = 16
SOURCES = [
    path
    for package in ("backend", "common", "benchmarks", "scripts")
    for path in (ROOT / package).rglob("*.py")
    if "_pb2" not in path.name
]
ENVIRONMENT_READERS = {
    ROOT / "backend" / name
    for name in (
        "__main__.py",
        "rank.py",
        "jobs/__main__.py",
        "cli/serve.py",
        "cli/doctor.py",
        "cli/fit.py",
    )
}


def test_no_module_is_longer_than_the_ceiling():
    for path in SOURCES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MODULE_CEILING, path


def test_files_have_names_of_their_own():
    names = Counter(path.name for path in SOURCES if path.name not in PACKAGE_FILES)
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_lie_in_the_tree_of_their_source():
    modules = {
        source.relative_to(ROOT / "backend").with_suffix("")
        for source in SOURCES
        if source.is_relative_to(ROOT / "backend")
    }
    places = {(module.parts[0], module.name): module.parent for module in modules}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        place = path.relative_to(ROOT / "tests").parent
        if place.parts and (ROOT / "backend" / place.parts[0] / "__init__.py").is_file():
            assert (ROOT / "backend" / place).is_dir(), path
            of = (place.parts[0], path.stem.removeprefix("test_"))
            assert places.get(of, place) == place, path


def is_program(path):
    """Tell whether a file is run by its path or as a module, by a person or a build tool."""
    return path == ROOT / "scripts" / "build_hook.py" or "\nif __name__ == " in path.read_text(
        encoding="utf-8"
    )


def test_the_loop_is_one_file_that_can_be_read_at_once():
    loop = ROOT / "backend" / "engine" / "loop.py"
    assert len(loop.read_text(encoding="utf-8").splitlines()) <= LOOP_CEILING


def test_files_hold_a_whole_concept():
    short = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name not in PACKAGE_FILES
        and len(path.read_text(encoding="utf-8").splitlines()) < MODULE_FLOOR
        and not is_program(path)
    ]
    assert short == []


def test_functions_are_short_and_nine_of_ten_are_very_short():
    lines = {
        f"{path.relative_to(ROOT)}:{node.name}:{node.lineno}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: count for name, count in lines.items() if count > FUNCTION_CEILING} == {}
    assert sorted(lines.values())[int(0.9 * len(lines))] <= FUNCTION_P90


def test_nothing_at_the_level_of_a_module_remembers_models():
    """Facts about a loaded model belong to the served model or to its session."""
    remembering = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.is_relative_to(ROOT / "backend")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if "Weak" in ast.dump(node) and isinstance(node, ast.Assign | ast.AnnAssign)
    }
    assert remembering == set()


def test_the_environment_is_read_where_processes_begin():
    readers = {
        path
        for path in SOURCES
        if path.is_relative_to(ROOT / "backend")
        and any(
            isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    }
    assert readers <= ENVIRONMENT_READERS


ROW = ROOT / "backend" / "engine" / "rows" / "row.py"
CHANGES = {"append", "extend", "insert", "pop", "remove", "clear"}


def changed_attributes(tree):
    """Yield the attributes of other objects than `self` that a module changes."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                changed = node
            case ast.Call(func=ast.Attribute(value=ast.Attribute() as changed, attr=name)):
                if name not in CHANGES:
                    continue
            case _:
                continue
        if not (isinstance(changed.value, ast.Name) and changed.value.id == "self"):
            yield changed


def test_a_row_changes_by_its_own_verbs_alone():
    tree = ast.parse(ROW.read_text(encoding="utf-8"))
    row = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Row")
    names = {each.target.id for each in row.body if isinstance(each, ast.AnnAssign)}
    assert {"fed", "cache", "token_ids", "has_left"} <= names
    changes = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in SOURCES
        if path != ROW and "engine.rows.row import" in path.read_text(encoding="utf-8")
        for node in changed_attributes(ast.parse(path.read_text(encoding="utf-8")))
        if node.attr in names
    ]
    assert changes == []


def test_calls_end_with_an_error_in_one_place():
    """There the message is cut to fit gRPC's trailers."""
    ending = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"abort", "set_details"}
    }
    assert ending == {"common/rpc.py"}


def catches_everything(node: ast.AST) -> bool:
    """Tell a broad `except` or `suppress`, unless it passes the error on."""
    match node:
        case ast.ExceptHandler(type=None | ast.Name(id="Exception" | "BaseException")):
            last = node.body[-1]
            return not (isinstance(last, ast.Raise) and last.exc is None)
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress")):
            names = {name.id for name in node.args if isinstance(name, ast.Name)}
            return not names.isdisjoint({"Exception", "BaseException"})
    return False


def test_everything_is_caught_only_where_the_architecture_page_says():
    broad = {
        path.relative_to(ROOT).as_posix().removeprefix("backend/")
        for path in SOURCES
        if path.is_relative_to(ROOT / "backend") or path.is_relative_to(ROOT / "common")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if catches_everything(node)
    }
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    _, _, table = page.partition("These places alone catch everything:")
    listed = re.findall(r"^ +\| `([\w/.]+)` \|", table.partition("\n\n`make")[0], re.MULTILINE)
    assert broad == set(listed)


def test_no_tracked_file_holds_a_path_of_a_machine():
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    # Spelled in pieces, so that this file does not match itself.
    machine_path = re.compile(r"(?<![\w.])/(" + "|".join(["work", "root", "farm"]) + r")/\w")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".png", ".safetensors"} or not path.is_file():
            continue
        assert not machine_path.search(path.read_text(encoding="utf-8")), name


def imported_by(*modules):
    """Return the names of all modules that are imported with some, in a new interpreter."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()


def test_importing_the_server_does_not_import_mlx():
    modules = imported_by("backend.__main__", "backend.engine.engine", "backend.rpc.services")
    assert not {"mlx", "mlx_lm", "transformers", "numpy", "huggingface_hub"} & set(modules)


def test_the_server_listens_before_it_imports_the_engine_and_its_services():
    late = ("backend.core", "backend.engine", "backend.formats", "backend.model", "backend.output")
    modules = imported_by("backend.__main__")
    assert "backend.rpc.server" in modules
    # It decodes requests there, and imports little.
    late_ones = set(modules) - {"backend.pipeline", "backend.pipeline.worker_pool"}
    assert not [name for name in late_ones if name.startswith((*late, "backend.pipeline"))]


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("backend.rpc.metrics", {"opentelemetry", "PIL", "av"}),
        ("backend.rpc.tracing", {"prometheus_client", "PIL", "av"}),
    ],
)
def test_a_feature_of_an_extra_needs_no_other_extra(module, others):
    assert others.isdisjoint(imported_by(module))


def test_no_variable_of_tests_is_read_by_the_product():
    product = [path for path in SOURCES if path.is_relative_to(ROOT / "backend")]
    assert product
    assert not [path for path in product if "MLX_BACKEND_TEST" in path.read_text(encoding="utf-8")]


TEST_CEILINGS = {
    "private attributes": 3,
    "private patches": 3,
    "patches": 105,
    "waits for a time": 8,
}
"""The counts in `tests` may fall, and then these fall with them."""


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_own(value: ast.expr) -> bool:
    """Whether an object is the class at hand, or one of the standard library."""
    return ast.unparse(value) in ("self", "cls", "super()", "os", "sys")


def _faults(node: ast.AST) -> set[str]:
    """The kinds of look into others' insides, or of waits for a time, that a node of a test is."""
    if isinstance(node, ast.Attribute):
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        return {"private attributes"} if is_private and not _is_own(node.value) else set()
    if not isinstance(node, ast.Call):
        return set()
    if _name_of(node) == "sleep":
        return set() if ast.unparse(node.args[0]) == "0" else {"waits for a time"}
    if _name_of(node) != "setattr":
        return set()
    private = any("._" in f".{ast.literal_eval(arg)}" for arg in node.args[:2] if _is_text(arg))
    return {"patches", "private patches"} if private else {"patches"}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_tests_look_at_what_is_public_and_wait_for_what_happens():
    found = Counter(
        fault
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for fault in _faults(node)
    )
    assert {kind: n for kind, n in found.items() if n > TEST_CEILINGS[kind]} == {}
