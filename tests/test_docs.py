import re
import shlex
import tomllib
from pathlib import Path

import yaml

from backend.cli.app import main
from backend.config import TuningOptions

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Of all pages together, as `wc -w` counts them: longer ones are not read.
MAX_WORDS = 36_000
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
FENCE = re.compile(r"^```(?:sh|console)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\.venv/bin/)?(?:mlx-grpc-backend|python -m backend\.cli) (.+)$")


def test_the_options_page_lists_every_option_with_its_default():
    page = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    expected = {
        name: "none" if default is None else f"`{default!s}`"
        for name, default in TuningOptions().by_name().items()
    }
    expected = {
        name: text.replace("True", "true").replace("False", "false")
        for name, text in expected.items()
    }
    assert {name: rows.get(name) for name in expected} == expected


def test_pages_link_to_pages_that_exist():
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not re.match(r"\w+:", target):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_all_pages_together_are_short_enough_to_be_read():
    words = {
        page.name: len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md")
    }
    assert sum(words.values()) <= MAX_WORDS, words


def listed(entry):
    """Return the pages below an entry of the navigation."""
    match entry:
        case str():
            return [entry]
        case list():
            return [page for each in entry for page in listed(each)]
        case dict():
            return [page for each in entry.values() for page in listed(each)]


def test_every_page_is_in_the_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert sorted(listed(site["nav"])) == pages


def shell_lines():
    """Yield the commands of the pages' code blocks, and those between backticks in their text."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = "".join(FENCE.findall(text)).replace("\\\n", " ")
        quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        yield from (line.split(" #")[0].strip() for line in [*blocks.splitlines(), *quoted])


def test_commands_of_make_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    lines = [line for line in shell_lines() if re.match(r"make( [a-z-]+)?( |$)", line)]
    named = {word for line in lines for word in line.split()[1:2] if word.islower()}
    assert named <= targets


def test_commands_of_ours_take_the_options_they_are_shown_with():
    for line in shell_lines():
        if not (match := COMMAND.match(line)) or "|" in line:
            continue
        name, *arguments = shlex.split(match[1])
        if name == "--help":
            continue
        command = main.get_command(None, name)
        assert command is not None, line
        known = {option for parameter in command.params for option in parameter.opts}
        known |= {option for each in command.params for option in each.secondary_opts}
        known |= {"--help"}
        if name == "rank":  # handed on
            known |= {"--rank", "--hosts", "--hostfile"}
        used = {argument.partition("=")[0] for argument in arguments if argument[:2] == "--"}
        assert used <= known, line


def test_extras_that_pages_name_exist():
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(r"(?:mlx-grpc-backend|\.whl)\[([a-z0-9,]+)\]", text)
    assert {extra for each in named for extra in each.split(",")} <= set(extras)
