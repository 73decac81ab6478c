"""The arguments of a tool in each dialect."""

from backend.formats.dialects import Dialect, Literals, Tags
from backend.sampling.grammar.tools.json_values import json_arguments
from backend.sampling.grammar.tools.literals import literal_arguments
from backend.sampling.grammar.tools.parameters import Parameters
from backend.sampling.grammar.tools.site import CallSite
from backend.sampling.grammar.tools.tags import tagged_arguments
from backend.sampling.grammar.tools.template import fill
from backend.sampling.grammar.writer import GrammarWriter, chain, sequence


def arguments_in(
    dialect: Dialect, site: CallSite, parameters: Parameters, writer: GrammarWriter
) -> str:
    """Return the expression of a tool's arguments, and of what follows them.

    Raises:
        PartError: A parameter cannot be enforced.
    """
    match dialect:
        case Tags():
            return tagged_arguments(dialect, site, parameters, writer)
        case Literals():
            return literal_arguments(dialect, site, parameters, writer)
        case _:
            after = sequence(fill(site.after, {}, writer))
            return chain(json_arguments(parameters, writer), after)
