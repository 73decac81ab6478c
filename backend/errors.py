"""Every error that a caller may see.

BackendError
├── FieldError                         a field or an option may be the reason
│   ├── InvalidRequestError            it is absent, malformed or out of range
│   │   ├── ContextLengthError         the prompt does not fit the context
│   │   └── GrammarError               a grammar or schema cannot be enforced
│   │       └── GrammarSyntaxError     it is malformed; the message gives the position
│   └── LoadError                      the model cannot be loaded as asked
│       ├── ModelNotFoundError         no such path, no such hub id
│       ├── UnsupportedModelError      not a model that MLX can run
│       ├── UnreadableTokenizerError   its tokenizer cannot be made
│       ├── OutOfMemoryError           it does not fit
│       ├── DiskFullError              a file that it needs cannot be written
│       ├── DownloadError              the hub could not be reached
│       ├── GroupNotFormedError        a process of the model's group is missing
│       ├── LoadCancelledError         the caller left while it was loading
│       └── LoadFailedError            loading failed unexpectedly
├── ModelNotLoadedError                nothing is loaded
├── WrongModelError                    the request names another model than the loaded one
├── OverloadedError                    too many requests are waiting
├── UnsupportedError                   the loaded model cannot do it
├── ShuttingDownError                  the process is shutting down
├── RequestCancelledError              ended by Free, by another load, or by the caller
│   └── ModelReplacedError             by another load
├── RefusedMediumError                 the model's processor cannot take a medium
├── GenerationFailedError              the engine could not compute this request
├── EngineFailedError                  the engine failed as a whole
├── EngineStuckError                   the engine does not finish a turn
├── DeviceLostError                    the device no longer computes
├── EngineDownError                    the engine failed, and could not restart
├── GroupLostError                     a process of the model's group is gone
└── HelperLostError                    a process that prepares requests was ended from outside
"""

from typing import Self


class BackendError(Exception):
    """A failure with a message for the caller."""

    def __copy__(self) -> Self:
        """Return the same error for another caller, because raising extends the traceback."""
        twin = type(self).__new__(type(self), *self.args)
        vars(twin).update(vars(self))
        return twin


TEXT_FIELD = "Prompt"
"""Named by an error of a text's tokens where its field is unknown."""


class FieldError(BackendError):
    """A failure for which a caller's field or option is the reason, where it is known.

    Attributes:
        field: The text begins with it; empty if it is unknown.
    """

    field = ""

    @property
    def problem(self) -> str:
        """The text without the field."""
        return str(self).removeprefix(f"{self.field}: ")


class InvalidRequestError(FieldError):
    """A field of a request is absent, malformed or out of range."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room in the context; the message holds both numbers."""

    @classmethod
    def beyond(cls, field: str, problem: str, limit: int) -> Self:
        """Return the error in the words by which agents know that they must shorten a prompt.

        litellm looks for the maximum context length, OpenHands for the request to reduce.
        """
        words = f"this model's maximum context length is {limit} tokens"
        return cls(field, f"{problem}: {words}, please reduce the length of the input")


class GrammarError(InvalidRequestError):
    """A grammar or a JSON schema is malformed, too large, or cannot be enforced."""

    def __init__(self, problem: str) -> None:
        super().__init__("Grammar", problem)


class GrammarSyntaxError(GrammarError):
    """The grammar has a syntax error; line and column count from 1."""

    def __init__(self, line: int, column: int, problem: str) -> None:
        super().__init__(f"line {line}, column {column}: {problem}")
        self.line = line
        self.column = column


class ModelNotLoadedError(BackendError):
    """No model is loaded. The host matches on the text."""

    def __init__(self) -> None:
        super().__init__("model not loaded")


class WrongModelError(BackendError):
    """The request names another model than the loaded one. The host matches on the text."""


class OverloadedError(BackendError):
    """The queue of waiting requests is full."""


class UnsupportedError(BackendError):
    """The loaded model, or this backend, does not support the request."""


class ShuttingDownError(BackendError):
    """The process takes no new work."""


class RequestCancelledError(BackendError):
    """The request was ended by Free, by another load or by its caller."""


class ModelReplacedError(RequestCancelledError):
    """Another load has ended the request; one without an answer yet begins anew."""


class RefusedMediumError(BackendError):
    """The model's processor cannot take a medium; the message is its own."""


class GenerationFailedError(BackendError):
    """The engine failed while computing this request; the others continue."""

    @classmethod
    def of_model(cls, error: Exception) -> Self:
        """Return the failure of the request that the model raised an error on."""
        return cls(f"the model failed on this request: {error}")


class EngineFailedError(BackendError):
    """The engine failed as a whole, with all of its requests; it restarts if it can."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine has failed: {reason}")


class EngineStuckError(BackendError):
    """The engine has been in one turn for too long."""


class DeviceLostError(BackendError):
    """The device no longer computes for this process; it may for another process."""


class EngineDownError(BackendError):
    """The engine failed and could not restart: only another load may help."""


class GroupLostError(BackendError):
    """A process that computed a part of the model is gone, and the model with it."""


class HelperLostError(BackendError):
    """Something ended the process that prepared this request, and its successor too."""


class LoadError(FieldError):
    """The model cannot be loaded as asked: a file, an adapter or an option does not fit."""

    def __init__(self, problem: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


class ModelNotFoundError(LoadError):
    """There is nothing at the path or under the hub id."""


class UnsupportedModelError(LoadError):
    """The files are not a model that MLX can run."""


class UnreadableTokenizerError(LoadError):
    """The checkpoint's tokenizer cannot be made; a fault elsewhere in its files may be why."""


class OutOfMemoryError(LoadError):
    """The model does not fit into memory."""


class DiskFullError(LoadError):
    """There is no room for a file that the load has to write."""


class DownloadError(LoadError):
    """The hub could not be reached, or refused."""


class GroupNotFormedError(LoadError):
    """A process that is to compute a part of the model did not join, or left."""


class LoadCancelledError(LoadError):
    """The caller left, or another load took over."""


class LoadFailedError(LoadError):
    """Loading failed for an unforeseen reason; the log has the traceback."""
