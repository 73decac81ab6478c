"""A headless Chromium of this machine, if it has one: what a page shows a person."""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    # Root has no sandbox, and opens its own pages only.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# What a page has before it is looked at, by its own clock.
BUDGET_MS = 5000
TIMEOUT_S = 120.0


def find_browser() -> str | None:
    """Return the path of a browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def rendered(browser: str, url: str) -> str:
    """Return the document of a page, as its scripts have left it."""
    return _run(browser, "--dump-dom", url)


def screenshot(browser: str, url: str, path: Path, *, width: int, height: int) -> None:
    """Write what a page shows as a PNG."""
    _run(browser, f"--screenshot={path}", f"--window-size={width},{height}", url)


def _run(browser: str, *arguments: str) -> str:
    with TemporaryDirectory(prefix="browser-") as profile:
        own = (f"--user-data-dir={profile}", f"--virtual-time-budget={BUDGET_MS}")
        done = subprocess.run(  # noqa: S603 - a browser of this machine on our own page
            [browser, *FLAGS, *own, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout
