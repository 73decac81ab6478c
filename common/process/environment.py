"""The environment of child processes: all of ours but secrets, and what concerns us alone."""

import re
from collections.abc import Mapping, MutableMapping

_SECRET_NAME = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEYS?|ACCESS_?KEYS?"
    r"|ACCESS_KEY_ID|PRIVATE_?KEYS?|AUTH|COOKIE)(_|$)",
    re.IGNORECASE,
)
# They steer a server, or describe the relation of a process to its starter.
_OWN_NAME = re.compile(
    r"(LISTEN_|WATCHDOG_|OTEL_|GRPC_|LOCALAI_(?!LOG_LEVEL))"
    r"|(NOTIFY_SOCKET|INVOCATION_ID|JOURNAL_STREAM|MAINPID|MLX_BACKEND_PARENT)$"
    r"|PYTHON(STARTUP|INSPECT|BREAKPOINT)$"
)


def withhold_secrets(environment: MutableMapping[str, str]) -> Mapping[str, str]:
    """Remove the variables that are secrets by their names, and return them.

    What this process starts afterwards inherits none of them.
    """
    names = [name for name in environment if _SECRET_NAME.search(name)]
    return {name: environment.pop(name) for name in names}


def for_children(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that are meant for child processes as well."""
    return {
        name: value
        for name, value in environment.items()
        if not (_SECRET_NAME.search(name) or _OWN_NAME.match(name))
    }
