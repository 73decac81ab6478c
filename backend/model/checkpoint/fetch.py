"""The child process that fetches a model: `python -m backend.model.checkpoint.fetch org/name`.

Writes one JSON object per line: `{"done": bytes, "total": bytes}` for progress, then
`{"path": ...}`. On failure, the last line of stderr gives the reason.
"""

import argparse
import json
import os
import sys
import threading
import time

EXIT_NOT_FOUND = 3
EXIT_FAILED = 4

PARENT_POLL_S = 1.0

_PATTERNS = ["*.json", "*.jsonl", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_CODE_PATTERNS = ["*.py"]
# Copies of the same weights in the authors' own layout.
_DUPLICATES = ["*/*.safetensors", "consolidated*.safetensors"]


def main() -> int:
    """Fetch a model and return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch a model.")
    parser.add_argument("repo_id", help="org/name on the hub")
    parser.add_argument("--parent", type=int, help="end when this process is no longer the parent")
    parser.add_argument("--with-code", action="store_true", help="fetch Python files too")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        watch = threading.Thread(target=_end_with_parent, args=[arguments.parent], daemon=True)
        watch.start()
    patterns = [*_PATTERNS, *(_CODE_PATTERNS if arguments.with_code else [])]
    return _fetch(arguments.repo_id, patterns)


def _fetch(repo_id: str, patterns: list[str]) -> int:
    # Imported late: the parent process imports this module for its constants.
    from huggingface_hub import errors, snapshot_download

    try:
        path = snapshot_download(
            repo_id,
            allow_patterns=patterns,
            ignore_patterns=_DUPLICATES,
            tqdm_class=_progress_class(),
        )
    except errors.GatedRepoError:
        return _fail(f"{repo_id} is gated: accept its terms on the hub and set HF_TOKEN")
    except errors.RepositoryNotFoundError:
        text = f"the hub has no model {repo_id}, or it is private and HF_TOKEN has no access to it"
        return _fail(text, EXIT_NOT_FOUND)
    except errors.IncompleteSnapshotError as error:
        return _fail(f"the local copy of {repo_id} is incomplete: {_first_line(error)}")
    except errors.LocalEntryNotFoundError as error:
        reason = _first_line(error.__cause__ or error)
        return _fail(f"{repo_id} is not on disk and the hub cannot be reached: {reason}")
    except (OSError, ValueError) as error:
        return _fail(f"{repo_id} could not be downloaded: {_first_line(error)}")
    _report({"path": path})
    return 0


def _progress_class() -> type:
    from huggingface_hub.utils import tqdm

    class Progress(tqdm):  # type: ignore[misc]
        """A progress bar that reports bytes instead of drawing."""

        def __init__(self, *args: object, **kwargs: object) -> None:
            # Without a terminal, the upstream bar disables itself and counts nothing.
            super().__init__(*args, **{**kwargs, "disable": False})

        def display(self, *_: object, **__: object) -> None:
            if self.unit == "B" and self.total:
                _report({"done": int(self.n), "total": int(self.total)})

        def close(self) -> None:
            # The upstream bar would draw once more.
            self.disable = True

    return Progress


def _report(report: dict[str, int | str]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def _fail(reason: str, status: int = EXIT_FAILED) -> int:
    sys.stderr.write(reason + "\n")
    return status


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
