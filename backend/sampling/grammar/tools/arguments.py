"""The arguments of a tool in each dialect."""

from backend.formats.dialects import Dialect, Literals, Tags
from backend.sampling.grammar.tools.json_values import json_arguments
from backend.sampling.grammar.tools.literals import literal_arguments
from backend.sampling.grammar.tools.parameters import Parameters
from backend.sampling.grammar.tools.tags import tagged_arguments
from backend.sampling.grammar.writer import GrammarWriter


def arguments_in(
    dialect: Dialect, forbidden: tuple[str, ...], parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments.

    Args:
        dialect: Syntax of the arguments.
        forbidden: Texts that raw values do not contain, besides those of the dialect.
        parameters: The parameters of the tool.
        writer: Collects the definitions.

    Raises:
        GrammarError: A parameter cannot be enforced; the message says which.
    """
    match dialect:
        case Tags():
            return tagged_arguments(dialect, forbidden, parameters, writer)
        case Literals():
            return literal_arguments(dialect, parameters, writer)
        case _:
            return json_arguments(parameters, writer)
