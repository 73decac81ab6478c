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
    """Return the expression of a tool's arguments; raw values do not contain forbidden texts.

    Raises:
        PartError: A parameter cannot be enforced.
    """
    match dialect:
        case Tags():
            return tagged_arguments(dialect, forbidden, parameters, writer)
        case Literals():
            return literal_arguments(dialect, parameters, writer)
        case _:
            return json_arguments(parameters, writer)
