"""Renders pages in this machine's headless Chromium, if it has one."""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    # Root has no sandbox, and opens only its own pages.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# Time for a page before it is read, by its own clock.
BUDGET_MS = 5000
TIMEOUT_S = 120.0


def find_browser() -> str | None:
    """Return the path of a browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def rendered(browser: str, url: str) -> str:
    """Return the document of a page after its scripts have run."""
    return _run(browser, "--dump-dom", url)


def screenshot(browser: str, url: str, path: Path, *, width: int, height: int) -> None:
    """Write a screenshot of a page as a PNG."""
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
